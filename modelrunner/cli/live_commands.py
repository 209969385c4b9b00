"""Follows the state of the daemon; the command top shows it."""

import time
from collections.abc import Iterator

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, decode
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.cli.devices import print_devices
from modelrunner.cli.output import note
from modelrunner.cli.times import until
from modelrunner.errors import AnswerBroken, DaemonUnreachable
from modelrunner.units import format_bytes

_BAR = 30  # columns
_USED, _FREE = "█", "░"
_AGAIN = 0.5  # seconds between two attempts to reach a daemon that has ended


@click.command()
@json_option
@with_client(start=False)
def top(client: HttpClient, as_json: bool) -> None:
    """Watch memory, runners, queue and requests.

    The screen follows every change, until Ctrl-C. With --json, the command prints one object of /engines/now a line.
    """
    import msgspec

    for now in states(client):
        if as_json:
            output.say(msgspec.json.encode(now).decode(), flush=True)
        else:
            output.clear()
            _show(now)


def _show(now: wire.Now) -> None:
    output.say(f"{now.status}: {len(now.runners)} runners, {now.running} requests under way")
    budgets = [now.budget.ram, *now.budget.vram]
    frees = [now.free.ram, *now.free.vram]
    for number, (budget, free) in enumerate(zip(budgets, frees, strict=True)):
        name = f"device {number - 1}" if number else "main memory"
        used = max(0, budget - free)
        filled = round(_BAR * used / budget) if budget else 0
        bar = _USED * filled + _FREE * (_BAR - filled)
        output.say(f"{name:<12}{bar} {format_bytes(used)} of {format_bytes(budget)}")
    output.say("")
    output.table(
        ("MODEL", "STATE", "MEMORY", "REQUESTS", "WAITING", "UNLOADS"),
        [
            (
                runner.model_name,
                f"{runner.state} ({runner.stage})" if runner.stage else runner.state,
                _memory(runner),
                str(runner.leases),
                str(runner.queued or ""),
                "pinned" if runner.pinned else "in use" if runner.leases else until(runner.expires_at),
            )
            for runner in now.runners
        ],
    )
    print_devices(now.devices, now.runners)
    loaded = {runner.model_name for runner in now.runners}
    for model, count in now.waiting.items():
        if model not in loaded:
            output.say(f"{model}: {count} wait; `modelrunner why {model}` explains why")
    if now.requests:
        output.say("")
        rows = [(r.model_name or r.model, r.route, f"{r.duration:.1f}s", r.caller, r.request_id) for r in now.requests]
        output.table(("REQUEST FOR", "ROUTE", "SINCE", "CALLER", "ID"), rows, expendable=("CALLER", "ROUTE"))


def _memory(runner: wire.RunnerStatus) -> str:
    memory = runner.memory.measured or runner.memory.estimated
    return format_bytes(memory.ram + sum(memory.vram))


def states(client: HttpClient) -> Iterator[wire.Now]:
    """Yields the state now and after every change, and waits for the next daemon if this one ends. Raises
    `DaemonUnreachable` if no daemon runs at the beginning."""
    begun = False
    while True:
        try:
            with client.open("GET", "/engines/now", headers={"Accept": "text/event-stream"}) as response:
                for event in client.events(response):
                    if event.name == "now":
                        begun = True
                        yield decode(event.data, wire.Now)
        except (DaemonUnreachable, AnswerBroken):
            if not begun:
                raise
        note("the daemon has ended; waiting for the next one, Ctrl-C ends")
        time.sleep(_AGAIN)
