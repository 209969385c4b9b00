"""The commands why, fit and events, which explain the daemon's decisions."""

import sys
from collections.abc import Iterator
from datetime import datetime

import click

from modelrunner import wire
from modelrunner.cli import FAILED, output
from modelrunner.cli.client import HttpClient, decode, path
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.units import format_bytes, format_duration

_FITS = {
    "now": "now",
    "after_eviction": "after other models have made room",
    "split": "in a smaller variant than the configured one",
    "never": "no",
}


@click.command()
@click.argument("model")
@json_option
@with_client(start=False)
def why(client: HttpClient, model: str, as_json: bool) -> None:
    """Explain why a model waits.

    Shows the last events about it, and about the models that were evicted for it.
    """
    raw = client.fetch("GET", path("engines", "why", model=model))
    explanation = decode(raw, wire.WhyResponse)
    if as_json:
        output.json(raw)
        return
    seconds = explanation.expected_seconds
    output.say(explanation.reason)
    output.fields(
        [
            ("state", explanation.state),
            *([("waits for", explanation.waiting_for)] if explanation.waiting_for else []),
            *([("position", str(explanation.position))] if explanation.position else []),
            *([("ready in", f"about {format_duration(round(seconds))}")] if seconds else []),
            *([("makes room", ", ".join(explanation.victims))] if explanation.victims else []),
            *_memory(explanation),
            *((_clock(event), _line(event)) for event in explanation.events),
        ]
    )


@click.command()
@click.argument("model")
@json_option
@with_client()
def fit(client: HttpClient, model: str, as_json: bool) -> int:
    """Check whether a model fits into memory and on the disk.

    MODEL may also be at its source: hf.co/ORG/REPO[:QUANT] is looked up, not downloaded. The exit code is 1 if the
    model does not fit.
    """
    raw = client.fetch("GET", path("models", model, "fit"), timeout=None)
    forecast = decode(raw, wire.Fit)
    code = FAILED if forecast.fits == "never" else 0
    if as_json:
        output.json(raw)
        return code
    output.say(forecast.reason)
    disk = forecast.disk
    output.fields(
        [
            ("fits", _FITS[forecast.fits]),
            *([("would evict", ", ".join(forecast.would_evict))] if forecast.would_evict else []),
            *_memory(forecast),
            *([("disk needed", format_bytes(disk.needed)), ("disk free", format_bytes(disk.free))] if disk else []),
        ]
    )
    return code


@click.command()
@click.option("--model", metavar="MODEL", help="Show only the events about this model.")
@click.option("--since", metavar="ID", help="Show the events after this ID; 0 for all that are kept.")
@json_option
@with_client(start=False)
def events(client: HttpClient, model: str | None, since: str | None, as_json: bool) -> None:
    """Show loads, evictions and other events as they happen.

    Ends with Ctrl-C. With --json, prints one object a line.
    """
    if since is None and output.is_terminal(sys.stderr):
        output.note("waiting for events; --since 0 shows the past ones too; Ctrl-C ends")
    with client.open("GET", path("engines", "events", model=model, since=since)) as response:
        for event in client.events(response):
            shown = decode(event.data, wire.Event)
            line = event.data if as_json else f"{_clock(shown)}  {shown.event.ljust(9)}  {_line(shown, kind=False)}"
            output.say(line, flush=True)


def _memory(forecast: wire.WhyResponse | wire.Fit) -> Iterator[tuple[str, str]]:
    for name, memory in (("needed", forecast.needed), ("free", forecast.free), ("budget", forecast.budget)):
        if memory is not None:
            devices = [f"{format_bytes(count)} on device {i}" for i, count in enumerate(memory.vram)]
            yield f"memory {name}", ", ".join([format_bytes(memory.ram), *devices])


def _clock(event: wire.Event) -> str:
    return datetime.fromisoformat(event.time).astimezone().strftime("%H:%M:%S")


def _line(event: wire.Event, *, kind: bool = True) -> str:
    what = " ".join(filter(None, [event.event if kind else "", event.model, event.runner and f"({event.runner})"]))
    return ": ".join(filter(None, [what, event.reason]))
