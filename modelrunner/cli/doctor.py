"""The command doctor, which finds faults of this machine or installation and names a remedy for each."""

import os
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import msgspec

from modelrunner import __version__, wire
from modelrunner.cli import FAILED, output
from modelrunner.cli.client import HttpClient
from modelrunner.cli.common_options import connect, json_option
from modelrunner.cli.devices import device_text
from modelrunner.cli.prepare import is_missing
from modelrunner.config.locations import ConfigurationError, Locations, first_private
from modelrunner.config.settings import Settings
from modelrunner.errors import DaemonUnreachable, ModelRunnerError
from modelrunner.units import format_bytes

_LEAST_DISK = 5 << 30
_LEAST_MEMORY = 2 << 30
_PROBE = 1.0  # seconds
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `state` is ok, warning or error; `remedy` says how to repair it, "" if nothing is wrong."""

    check: str
    state: str
    text: str
    remedy: str = ""


@click.command()
@click.option("--host", metavar="URL", help="The daemon: unix:///path or http://host:port.")
@json_option
@click.pass_context
def doctor(context: click.Context, host: str | None, as_json: bool) -> int:
    """Check this machine and the installation for faults.

    The command starts nothing, and makes only the folder of the socket. The exit code is 1 if there is an error.
    """
    findings = list(examine(host or context.find_root().params.get("host")))
    if as_json:
        output.json(msgspec.json.encode([asdict(finding) for finding in findings]))
    else:
        output.fields((f"{finding.state:<8} {finding.check}", finding.text) for finding in findings)
        for finding in findings:
            if finding.remedy:
                output.say(f"\n{finding.check}: {finding.remedy}")
    return FAILED if any(finding.state == "error" for finding in findings) else 0


def examine(host: str | None) -> Iterator[Finding]:
    yield _python()
    try:
        places = Locations.find()
        settings = Settings.load(places)
    except ConfigurationError as error:
        yield Finding(
            "configuration", "error", error.message, "correct the file; docs/configuration.md has every setting"
        )
        return
    yield Finding("configuration", "ok", str(places.config_file))
    yield from (_disk(name, place) for name, place in (("data", places.data), ("cache", places.cache)))
    yield _runtime(places)
    yield _memory()
    yield _proxies(os.environ)
    yield _gpu()
    client = connect(host, start=False)
    try:
        status = client.call("GET", "/version", wire.Status)
    except DaemonUnreachable:
        yield Finding("daemon", "ok", "none runs; commands that need it start it")
        yield _port(settings.listen)
        return
    except ModelRunnerError as error:
        yield Finding(
            "daemon", "error", error.message, "`modelrunner logs` may say why; `modelrunner shutdown` ends it"
        )
        return
    yield _version(status)
    yield from _folders(status)
    yield from _devices(status)
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "engines": lambda: _engines(client),
        "models": lambda: _models(client, status.model_dirs.values()),
        "readiness": lambda: _readiness(client),
    }
    for name, check in checks.items():
        try:
            yield from check()
        except ModelRunnerError as error:
            yield Finding(name, "error", error.message, "`modelrunner logs` may say why")


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.maxsize < 2**32:
        return Finding("python", "error", f"{version} for 32 bits", "install modelrunner with a Python for 64 bits")
    return Finding("python", "ok", f"{version} at {sys.executable}")


def _disk(name: str, place: Path) -> Finding:
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if not os.access(there, os.W_OK):
        variable = f"MODELRUNNER_{name.upper()}_DIR"
        return Finding(name, "error", f"{place} cannot be written", f"make it writable, or set another with {variable}")
    free = shutil.disk_usage(there).free
    text = f"{place}, {format_bytes(free)} free"
    if free < _LEAST_DISK:
        return Finding(
            name, "warning", text, "`modelrunner df` shows the disk space of each model, `modelrunner prune` frees some"
        )
    return Finding(name, "ok", text)


def _runtime(places: Locations) -> Finding:
    try:
        return Finding("socket folder", "ok", str(first_private(places.runtimes)))
    except ConfigurationError as error:
        return Finding("socket folder", "error", error.message, "set another folder with MODELRUNNER_RUNTIME_DIR")


def _memory(root: Path = Path("/")) -> Finding:
    """Checks the machine's memory and the limit of this process's group (Linux:
    Documentation/admin-guide/cgroup-v2.rst)."""
    import psutil

    total, limit = psutil.virtual_memory().total, _group_limit(root)
    known = min(total, limit) if limit else total
    text = f"{format_bytes(total)}" + (f", limited to {format_bytes(limit)}" if limit and limit < total else "")
    if known < _LEAST_MEMORY:
        return Finding("memory", "warning", text, "models under 1 GB fit; raise the limit of the container or service")
    return Finding("memory", "ok", text)


def _group_limit(root: Path) -> int | None:
    try:
        group = (root / "proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    except OSError:
        return None
    limits = []
    folder = root / "sys/fs/cgroup" / group
    for place in (folder, *folder.parents):
        try:
            limits.append(int((place / "memory.max").read_text()))
        except (OSError, ValueError):  # the file is missing, or has "max"
            continue
    return min(limits, default=None)


def _proxies(environ: "os._Environ[str] | dict[str, str]") -> Finding:
    proxies = [name for name in _PROXIES if environ.get(name) or environ.get(name.lower())]
    if not proxies:
        return Finding("proxies", "ok", "none")
    excepted = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    text = f"{', '.join(proxies)} set; not used for {excepted or 'nothing'}"
    if not any(local in excepted for local in ("127.0.0.1", "localhost", "*")):
        remedy = "programs would ask the proxy for this daemon: set NO_PROXY=127.0.0.1,localhost"
        return Finding("proxies", "warning", text, remedy)
    return Finding("proxies", "ok", text)


def _gpu() -> Finding:
    """Checks for an NVIDIA card without its driver (PCI vendor 0x10de), which would stay unused without any message."""
    vendors = set()
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            if (device / "class").read_text().startswith("0x03"):  # display controllers
                vendors.add((device / "vendor").read_text().strip())
        except OSError:
            continue
    if "0x10de" in vendors and not Path("/dev/nvidiactl").exists():
        return Finding("gpu", "warning", "an NVIDIA card without its driver", "install NVIDIA's driver; see nvidia-smi")
    if Path("/dev/nvidiactl").exists():
        return Finding("gpu", "ok", "NVIDIA's driver is there")
    return Finding("gpu", "ok", "no card that needs a driver of its own")


def _port(listen: str) -> Finding:
    if not listen:
        return Finding("port", "ok", "none: `listen` is empty, and only the Unix socket is served")
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if "[" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(_PROBE)
        try:
            probe.connect((host.strip("[]") or "127.0.0.1", int(port)))
        except OSError:
            return Finding("port", "ok", f"{listen} is free")
    remedy = "programs that use this port reach the other program: stop it, or set `listen` to another port"
    return Finding("port", "warning", f"another program listens on {listen}", remedy)


def _version(status: wire.Status) -> Finding:
    text = f"process {status.pid}, version {status.version}, {status.listen or 'no port'}"
    if status.version != __version__:
        remedy = f"this command is {__version__}: `modelrunner shutdown`; the next command starts the new daemon"
        return Finding("daemon", "warning", text, remedy)
    return Finding("daemon", "ok", text)


def _folders(status: wire.Status) -> Iterator[Finding]:
    for path, fault in status.model_dirs.items():
        if fault:
            yield Finding("models folder", "error", fault)
        elif len(status.model_dirs) > 1:
            yield _disk("models folder", Path(path))


def _devices(status: wire.Status) -> Iterator[Finding]:
    for number, device in enumerate(status.devices):
        name, text = f"device {number}", device_text(device)
        if device.fault:
            yield Finding(name, "error", text, "see the kernel's log (`dmesg`); the other devices are used meanwhile")
        elif device.budget < device.total // 10:
            remedy = "end the programs that hold its memory (NVIDIA: nvidia-smi lists them), or set a smaller reserve"
            yield Finding(name, "warning", f"{text}: other programs fill it", remedy)
        else:
            yield Finding(name, "ok", text)


def _engines(client: HttpClient) -> Iterator[Finding]:
    for name, text in client.call("GET", "/engines/status", dict[str, str]).items():
        if is_missing(text):
            yield Finding(f"engine {name}", "ok", f"not installed; `modelrunner install {name}` installs it")
        elif text.startswith("Error"):
            yield Finding(f"engine {name}", "error", text, f"`modelrunner update {name}` installs it again")
        elif "; " in text:
            yield Finding(f"engine {name}", "warning", *text.split("; ", 1))
        else:
            yield Finding(f"engine {name}", "ok", text)


def _models(client: HttpClient, away: Collection[str]) -> Iterator[Finding]:
    """Checks the models. `away` are the faults of folders, which are not damage of their models."""
    models = client.call("GET", "/models", list[wire.Model])
    yield Finding("models", "ok", f"{len(models)} on this machine")
    for model in models:
        if model.damage and model.damage not in away:
            yield Finding(
                f"model {model.name}",
                "error",
                model.damage,
                f"`modelrunner pull {model.name}` heals it, `modelrunner rm {model.id}` removes it",
            )


def _readiness(client: HttpClient) -> Iterator[Finding]:
    health = client.call("GET", "/health", wire.Health)
    if health.status in ("error", "shutting_down"):
        yield Finding("health", "error", health.reason or health.status, "`modelrunner logs` says why")
