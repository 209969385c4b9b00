"""The commands about the daemon itself."""

import gc
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from platform import python_version

import click
import msgspec

from modelrunner import __version__, wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, decode, path
from modelrunner.cli.common_options import absent, json_option, with_client
from modelrunner.cli.devices import device_text
from modelrunner.errors import DaemonUnreachable, ModelRunnerError, NotFound
from modelrunner.units import format_bytes

STOP_LIMIT = 120.0  # seconds until a daemon that was asked to stop must be gone
_POLL = 0.02
_SHOWN_LINES = 200  # of a log, on a terminal


class _LineCount(click.ParamType[str]):
    name = "N|all"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value != "all" and not (value.isascii() and value.isdigit() and len(value) < 10):
            self.fail(f"{value!r} is neither a number of lines nor `all`", param, ctx)
        return value


@click.command()
@json_option
@with_client(start=False)
def status(client: HttpClient, as_json: bool) -> None:
    """Show the daemon, its engines and its memory.

    The exit code is 3 if no daemon runs.
    """
    try:
        raw = client.fetch("GET", "/version")
    except DaemonUnreachable:
        if as_json:
            output.json(b'{"running": false}')
        else:
            output.fields([("running", "no"), ("looked at", client.host), *_places(client)])
        raise
    report = decode(raw, wire.Status)
    if as_json:
        output.json(raw)
        return
    output.fields(
        [
            ("running", f"process {report.pid}, version {report.version}"),
            ("socket", report.socket),
            ("listen", report.listen or "none"),
            ("data", report.data_dir),
            *((f"engine {name}", text) for name, text in report.backends.items()),
            *((f"memory {name}", format_bytes(count)) for name, count in report.memory.items()),
            *((f"device {number}", device_text(device)) for number, device in enumerate(report.devices)),
            *([("cluster", report.cluster)] if report.cluster else []),
            *((f"host {name}", state) for name, state in report.hosts.items()),
            ("sandbox", report.sandbox),
            *((f"sandbox of {runner}", text) for runner, text in report.sandboxes.items()),
        ]
    )


@click.command()
@click.argument("name", required=False, metavar="[MODEL|RUNNER]")
@click.option("-f", "--follow", is_flag=True, help="Follow it as it grows, until Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    type=_LineCount(),
    help=f"Show the last N lines, or `all`. Default: {_SHOWN_LINES} on a terminal, else all.",
)
@with_client(start=False)
def logs(client: HttpClient, name: str | None, follow: bool, lines: str | None) -> None:
    """Show the log of the daemon or of a runner.

    A runner is named by its model, or by its ID as `modelrunner ps` shows it. Without a daemon, the log of the last one
    is shown.
    """
    if lines is None and output.is_terminal(sys.stdout):
        lines = str(_SHOWN_LINES)
    query = {"follow": "true" if follow else None, "lines": None if lines == "all" else lines}
    try:
        if name is None:
            return _print_log(client, path("logs", **query))
        try:
            _print_log(client, path("logs", runner=name, **query))
        except NotFound:
            _print_log(client, path("logs", model=name, **query))
    except DaemonUnreachable:
        if (places := absent(client)) is None:
            raise
        from modelrunner.daemon.logs import daemon_log

        folder = places.data / "logs"
        if name is not None or not (log := daemon_log(folder)).exists():
            raise DaemonUnreachable(
                f"no daemon runs: `modelrunner serve` starts one; the logs of engines are in {folder}"
            ) from None
        output.note(f"no daemon runs; the last one wrote {log}:")
        with log.open("rb") as file:
            for line in deque(file, None if lines in (None, "all") else int(lines)):
                sys.stdout.write(output.shown(line.decode("utf-8", "replace"), sys.stdout))


@click.command()
@click.option("--listen", metavar="HOST:PORT", help="The TCP address; empty for none.")
@click.option("--socket", metavar="PATH", help="The Unix socket.")
@click.option("--tls", type=click.Choice(["off", "self-signed"]), help="TLS on TCP, with a certificate made here.")
def serve(listen: str | None, socket: str | None, tls: str | None) -> None:
    """Run the daemon in the foreground."""
    gc.disable()  # off until the daemon serves: the objects of a start are not garbage
    from modelrunner.config.locations import Locations
    from modelrunner.config.settings import Settings
    from modelrunner.daemon.app import run

    socket = os.path.abspath(socket) if socket else None
    run(Settings.load(Locations.find(), listen=listen, socket=socket, tls=tls))


@click.command()
@with_client(start=False)
def shutdown(client: HttpClient) -> None:
    """Stop the daemon and everything that it runs.

    Running answers may end first. The command returns when the daemon is gone.
    """
    end_daemon(client)
    output.note("the daemon has ended")


@click.command()
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@with_client()
def ui(client: HttpClient, no_browser: bool) -> None:
    """Open the page: memory, models, chat, requests."""
    is_local = client.host.startswith("unix:")
    address = client.call("GET", "/version", wire.Status).listen if is_local else client.host
    if not address:
        raise DaemonUnreachable(
            'this daemon has no port for a browser: set listen = "127.0.0.1:12434" in config.toml, or free the port if '
            "another program has it, then start the daemon again"
        )
    output.say(f"{address}/ui")
    if not no_browser:
        import webbrowser

        if not webbrowser.open(f"{address}/ui"):
            output.note("no browser could be opened: open this address in one")


@click.command()
@json_option
@with_client(start=False)
def version(client: HttpClient, as_json: bool) -> None:
    """Show the versions of the command line and of the daemon."""
    daemon = None
    with suppress(DaemonUnreachable):
        daemon = client.call("GET", "/version", wire.Status).version
    if as_json:
        output.json(msgspec.json.encode({"client": __version__, "daemon": daemon, "python": python_version()}))
    else:
        output.fields([("modelrunner", __version__), ("daemon", daemon or "none runs"), ("python", python_version())])


def _places(client: HttpClient) -> list[tuple[str, str]]:
    """Returns where the files of this user's daemon are, if it does not run."""
    if (places := absent(client)) is None:
        return []
    return [("data", str(places.data)), ("settings", str(places.config_file)), ("logs", str(places.data / "logs"))]


def _print_log(client: HttpClient, where: str) -> None:
    with client.open("GET", where) as response:
        for line in client.lines(response):
            sys.stdout.write(output.shown(line.decode("utf-8", "replace"), sys.stdout))
            sys.stdout.flush()


def end_daemon(client: HttpClient) -> None:
    """Asks the daemon to end, and returns when it is gone. Raises `ModelRunnerError` if it does not end."""
    pid = client.call("GET", "/version", wire.Status).pid if client.host.startswith("unix:") else None
    with _process(pid, otherwise=lambda: not _answers(client)) as has_ended:
        client.fetch("POST", "/shutdown")
        end = time.monotonic() + STOP_LIMIT
        while not has_ended():
            if time.monotonic() > end:
                raise ModelRunnerError(f"the daemon does not end (process {pid or 'unknown'}); see `modelrunner logs`")
            time.sleep(_POLL)


def _answers(client: HttpClient) -> bool:
    try:
        client.fetch("GET", "/health")
    except ModelRunnerError:
        return False
    return True


@contextmanager
def _process(pid: int | None, otherwise: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether the process has ended. Without a pid, as for a daemon on another machine, it
    is `otherwise`: a question to a service manager's socket would start the next daemon. A pidfd distinguishes a zombie
    from a living process, where the system has pidfds."""
    if pid is None:
        yield otherwise
    elif sys.platform == "linux":
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:  # the process is in another namespace
            yield otherwise
            return
        try:
            yield lambda: bool(select.select([descriptor], [], [], 0)[0])
        finally:
            os.close(descriptor)
    else:
        yield lambda: not _exists(pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
