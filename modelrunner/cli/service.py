"""The command service, which makes the daemon a service of the user, under systemd or launchd."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import click

from modelrunner.cli import output
from modelrunner.cli.common_options import connect, json_option
from modelrunner.cli.daemon_commands import end_daemon
from modelrunner.config import lockfile
from modelrunner.config.locations import Locations
from modelrunner.errors import ModelRunnerError, NotFound

_LABEL = "modelrunner"
_SETTINGS = ("DATA_DIR", "CACHE_DIR", "RUNTIME_DIR", "CONFIG", "LISTEN")


@dataclass(frozen=True, slots=True)
class Manager:
    """A service manager: the `files` that it reads, a command that fails where it does not answer (`reach`), and the
    commands for each action."""

    files: dict[Path, str]
    reach: list[str]
    install: list[list[str]]
    status: list[str]
    remove: list[list[str]]


@click.group()
def service() -> None:
    """Start the daemon with this user's session.

    The daemon starts at the login, so its port answers without a command before. On Linux systemd holds the Unix
    socket, too, and starts a daemon that has ended with the next command.
    """


@service.command()
@click.option("--linger", is_flag=True, help="Start it with the machine, without a login (Linux).")
@click.option("--dry-run", is_flag=True, help="Only show the files and commands.")
def install(linger: bool, dry_run: bool) -> None:
    """Write the service's files, and start it.

    A daemon that runs already ends after its last answers, and the service's takes its place.
    """
    manager = _manager()
    if linger and sys.platform != "linux":
        raise click.UsageError("--linger is systemd's: elsewhere the daemon starts at the login")
    commands = [*manager.install, *([["loginctl", "enable-linger"]] if linger else [])]
    if dry_run:
        for file, text in manager.files.items():
            output.say(f"# {file}\n{text}")
        for command in commands:
            output.say(" ".join(command))
        return
    _check(manager)
    if subprocess.run(manager.reach, capture_output=True, check=False).returncode:
        raise ModelRunnerError(
            f"`{' '.join(manager.reach)}` does not reach this user's service manager: log in as the user (`su` and "
            "`sudo` begin no session of it), or let another manager run `modelrunner serve`; nothing was changed"
        )
    for file, text in manager.files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        output.note(f"wrote {file}")
    if holder := lockfile.holder(Locations.find().data):
        output.note("the daemon that runs ends after its last answers")
        end_daemon(connect(f"unix://{holder.socket}", start=False))
    for command in commands:
        _run(command)
    if sys.platform == "linux" and not linger:
        output.note(
            "it starts at your login and ends when you log out: `modelrunner service install --linger` (or `loginctl "
            "enable-linger`) lets it start with the machine and stay"
        )
    output.say("installed")


@service.command()
@json_option
def status(as_json: bool) -> int:
    """Show whether the service is installed and runs. The exit code is the service manager's."""
    manager = _manager()
    _check(manager)
    if as_json:
        code = subprocess.run(manager.status, capture_output=True, check=False).returncode
        installed = any(file.exists() for file in manager.files)
        output.done("", as_json, installed=installed, active=code == 0, files=[str(file) for file in manager.files])
        return code
    _installed(manager)
    return subprocess.run(manager.status, check=False).returncode


@service.command()
def remove() -> None:
    """Stop the service, and remove its files."""
    manager = _manager()
    _check(manager)
    _installed(manager)
    for command in manager.remove:
        _run(command)
    for file in manager.files:
        file.unlink(missing_ok=True)
    if sys.platform == "linux":
        _run(["systemctl", "--user", "daemon-reload"])
    output.say("removed")


def _manager() -> Manager:
    makers: dict[str, Callable[[Locations], Manager]] = {"linux": systemd, "darwin": launchd}
    if sys.platform not in makers:
        raise ModelRunnerError(f"no service manager of {sys.platform} is known: run `modelrunner serve` from yours")
    return makers[sys.platform](Locations.find())


def systemd(places: Locations) -> Manager:
    """Returns the files and commands for systemd (systemd.socket(5), systemd.service(5)). The environment's places and
    address are kept."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"
    socket = (
        "[Unit]\nDescription=modelrunner's socket\n\n"
        f"[Socket]\nListenStream={str(places.socket).replace('%', '%%')}\nSocketMode=0600\nDirectoryMode=0700\n\n"
        "[Install]\nWantedBy=sockets.target\n"
    )
    kept = "".join(f'Environment="{_escaped(f"{name}={value}")}"\n' for name, value in _environment().items())
    program = " ".join(f'"{_escaped(part).replace("$", "$$")}"' for part in _program())
    unit = (
        "[Unit]\nDescription=modelrunner: language models on this machine\nRequires=modelrunner.socket\n\n"
        f"[Service]\nExecStart={program}\nExecReload=/bin/kill -HUP $MAINPID\n{kept}"
        "KillMode=mixed\nRestart=on-failure\n\n"
        "[Install]\nWantedBy=default.target\n"  # the port answers after the login
    )
    control = ["systemctl", "--user"]
    return Manager(
        {folder / f"{_LABEL}.socket": socket, folder / f"{_LABEL}.service": unit},
        [*control, "show-environment"],
        [[*control, "daemon-reload"], [*control, "enable", "--now", f"{_LABEL}.socket", f"{_LABEL}.service"]],
        [*control, "status", f"{_LABEL}.socket", f"{_LABEL}.service"],
        [[*control, "disable", "--now", f"{_LABEL}.socket", f"{_LABEL}.service"]],
    )


def launchd(places: Locations) -> Manager:
    """Returns the files and commands for launchd (launchd.plist(5))."""
    file = Path.home() / "Library" / "LaunchAgents" / f"{_LABEL}.plist"
    arguments = "".join(f"<string>{escape(part)}</string>" for part in _program())
    kept = "".join(f"<key>{n}</key><string>{escape(v)}</string>" for n, v in _environment().items())
    text = (
        '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" '
        '"http://www.apple.com/DTDs/PropertyList-1.0.dtd">\n<plist version="1.0"><dict>\n'
        f"<key>Label</key><string>{_LABEL}</string>\n<key>ProgramArguments</key><array>{arguments}</array>\n"
        f"<key>EnvironmentVariables</key><dict>{kept}</dict>\n"
        "<key>RunAtLoad</key><true/>\n<key>KeepAlive</key><dict><key>SuccessfulExit</key><false/></dict>\n"
        "</dict></plist>\n"
    )
    user = f"gui/{os.getuid()}"
    return Manager(
        {file: text},
        ["launchctl", "print", user],
        [["launchctl", "bootstrap", user, str(file)]],
        ["launchctl", "print", f"{user}/{_LABEL}"],
        [["launchctl", "bootout", f"{user}/{_LABEL}"]],
    )


def _program() -> list[str]:
    return [sys.executable, "-P", "-m", "modelrunner", "serve"]


def _environment() -> dict[str, str]:
    names = [f"MODELRUNNER_{name}" for name in _SETTINGS]
    return {name: os.environ[name] for name in names if name in os.environ}


def _escaped(text: str) -> str:
    """Escapes a text for a quoted value of a unit (systemd.syntax(7)); `%` begins a specifier (systemd.unit(5))."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def _check(manager: Manager) -> None:
    if shutil.which(manager.status[0]) is None:
        raise ModelRunnerError(
            f"{manager.status[0]} is not on this machine: run `modelrunner serve` from the service manager that is"
        )


def _installed(manager: Manager) -> None:
    if not any(file.exists() for file in manager.files):
        raise NotFound("the service is not installed: `modelrunner service install` installs it")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelRunnerError(
            f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}; "
            "`modelrunner service install --dry-run` shows the files and commands"
        )
