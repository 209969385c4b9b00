"""The commands about other machines: those of the cluster, and this one as a host."""

from dataclasses import replace

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, decode, path
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.units import format_bytes

_HEADINGS = ("HOST", "STATE", "ADDRESS", "MEMORY", "DEVICES", "MODELS", "RUNNERS")


@click.group()
def hosts() -> None:
    """List the machines of the cluster, or drain one."""


@hosts.command("list")
@json_option
@with_client(start=False)
def list_hosts(client: HttpClient, as_json: bool) -> None:
    """List the machines of the cluster."""
    _show(client.fetch("GET", "/hosts"), as_json)


@hosts.command()
@click.argument("model")
@click.option("--on", "names", multiple=True, metavar="NAME", help="Only to this one; may be given several times.")
@json_option
@with_client(start=False)
def preload(client: HttpClient, model: str, names: tuple[str, ...], as_json: bool) -> int:
    """Bring a model and its engine to all hosts, before its first request there.

    The exit code is 1 if one has not got them.
    """
    raw = client.fetch("POST", "/hosts/preload", {"model": model, "hosts": list(names)}, timeout=None)
    problems = decode(raw, wire.HostPreloads).problems
    if as_json:
        output.json(raw)
    else:
        output.table(("HOST", "STATE"), [(name, problem or "has it") for name, problem in problems.items()])
    return 1 if any(problems.values()) else 0


@hosts.command()
@click.argument("name")
@json_option
@with_client(start=False)
def drain(client: HttpClient, name: str, as_json: bool) -> None:
    """End the runners of a host after their last requests, and start no others there."""
    _show(client.fetch("POST", path("hosts", name, "drain"), {"drain": True}, timeout=None), as_json)


@hosts.command()
@click.argument("name")
@json_option
@with_client(start=False)
def use(client: HttpClient, name: str, as_json: bool) -> None:
    """Use a drained host again."""
    _show(client.fetch("POST", path("hosts", name, "drain"), {"drain": False}), as_json)


def _show(raw: bytes, as_json: bool) -> None:
    if as_json:
        output.json(raw)
        return
    hosts = decode(raw, wire.Hosts)
    output.table(_HEADINGS, [_row(host) for host in hosts.hosts], expendable=("ADDRESS", "MODELS"))
    if hosts.problem:
        output.note(hosts.problem)


def _row(host: wire.HostStatus) -> tuple[str, ...]:
    memory = format_bytes(host.budget.ram) if host.budget else ""
    devices = ", ".join(host.devices)
    return host.name, host.state, host.address, memory, devices, str(host.models), str(host.runners)


@click.command()
@click.argument("address")
def host(address: str) -> None:
    """Serve as a host of another machine, which starts this command and gives it a key."""
    from modelrunner.config.locations import Locations
    from modelrunner.config.settings import Settings
    from modelrunner.daemon.hostmode import run_host

    places = Locations.find()
    run_host(Settings.load(replace(places, data=places.data / "host")), address)
