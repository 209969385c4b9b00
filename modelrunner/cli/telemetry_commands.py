"""The commands requests and usage."""

from datetime import datetime

import click
import msgspec

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli import replay as replays
from modelrunner.cli.client import HttpClient, decode, path
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.units import format_duration

_HEADINGS = (
    "TIME",
    "STATUS",
    "MODEL",
    "PROMPT",
    "ANSWER",
    "TOKENS/S",
    "QUEUE",
    "LOAD",
    "FIRST",
    "TOTAL",
    "CALLER",
    "ID",
)
_EXPENDABLE = ("CALLER", "LOAD", "QUEUE", "TOKENS/S", "PROMPT")


@click.group(invoke_without_command=True)
@click.option("-f", "--follow", is_flag=True, help="Show requests as they end, until Ctrl-C.")
@click.option("--model", metavar="MODEL", help="Show only those for this model.")
@click.option("--status", metavar="CODE", help="Show only those with this HTTP status; 0 for those under way.")
@click.option("-n", "--limit", type=click.IntRange(1), default=50, show_default=True, help="The most requests to show.")
@json_option
@with_client(start=False)
def requests(
    client: HttpClient, follow: bool, model: str | None, status: str | None, limit: int, as_json: bool
) -> None:
    """Show the requests under way, and the last ones.

    The daemon keeps the last 1,000, without their texts; `show` has those of models that are recorded. With -f --json,
    the command prints one object a line.
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    if follow:
        _say_if_off(client)
        headers = {"Accept": "text/event-stream"}
        with client.open("GET", path("engines", "requests", model=model, status=status), headers=headers) as response:
            for event in client.events(response):
                line = event.data if as_json else "  ".join(filter(None, _row(decode(event.data, wire.RequestStatus))))
                output.say(line, flush=True)
        return
    raw = client.fetch("GET", path("engines", "requests", model=model, status=status, limit=str(limit)))
    records = decode(raw, list[wire.RequestStatus])
    if not any(entry.status for entry in records):
        _say_if_off(client)
    if as_json:
        output.json(raw)
    else:
        output.table(_HEADINGS, map(_row, records), expendable=_EXPENDABLE)


@requests.command()
@click.argument("id")
@json_option
@with_client(start=False)
def cancel(client: HttpClient, id: str, as_json: bool) -> None:
    """End a request that is under way."""
    client.fetch("POST", path("engines", "requests", id, "cancel"))
    output.done(f"cancelled: {id}", as_json, cancelled=id)


@requests.command()
@click.argument("id")
@json_option
@with_client(start=False)
def show(client: HttpClient, id: str, as_json: bool) -> None:
    """Show a recorded request with its body and its answer.

    Bodies are kept after `modelrunner configure MODEL --recording on`.
    """
    raw = client.fetch("GET", path("engines", "requests", id))
    if as_json:
        output.json(raw)
        return
    recorded = decode(raw, wire.RecordedRequest)
    output.fields(
        [
            ("request", recorded.request.request_id),
            ("time", recorded.request.time),
            ("path", recorded.path),
            ("model", recorded.request.model_name),
            ("status", f"{recorded.request.status} {recorded.request.error}".strip()),
            ("key", recorded.request.key or "(none)"),
        ]
    )
    for name, body in (("body", recorded.body), ("answer", recorded.answer)):
        cut = "" if body.whole else f", of which {len(body.text.encode())} are kept"
        gone = f"; {body.redacted} redacted" if body.redacted else ""
        output.heading(f"{name}: {body.size} bytes{cut}{gone}")
        output.say(replays.answer_text(body.text) if name == "answer" else body.text)


@requests.command()
@click.argument("id")
@click.option("--model", metavar="MODEL", help="Ask this model instead.")
@json_option
@with_client(start=False)
def replay(client: HttpClient, id: str, model: str | None, as_json: bool) -> None:
    """Send a recorded request again, and compare the answers.

    The command prints the new answer on stdout, and its difference from the recorded one on stderr.
    """
    recorded = client.call("GET", path("engines", "requests", id), wire.RecordedRequest)
    answer = replays.again(client, recorded, model).decode("utf-8", "replace")
    before, now = replays.answer_text(recorded.answer.text), replays.answer_text(answer)
    if as_json:
        result = {"request_id": id, "same": before == now, "before": before, "answer": now}
        output.json(msgspec.json.encode(result))
        return
    output.say(now)
    if not recorded.answer.whole or recorded.answer.redacted:
        output.note("the recorded answer is not whole, so it is not compared")
    elif before == now:
        output.note("the answer is the same as the recorded one")
    else:
        output.note(f"the answer differs from the recorded one:\n{replays.difference(before, now)}")


@click.command()
@click.option(
    "--by",
    type=click.Choice(["model", "key", "day"]),
    default="model",
    show_default=True,
    help="The grouping of the sums.",
)
@click.option(
    "--since", metavar="AGE", default="30d", show_default=True, help="The age of the oldest request: 7d, 12h."
)
@json_option
@with_client()
def usage(client: HttpClient, by: str, since: str, as_json: bool) -> None:
    """Show requests, tokens and engine time.

    The figures are of requests that an engine answered. Days are in UTC.
    """
    raw = client.fetch("GET", path("usage", by=by, since=since))
    totals = decode(raw, list[wire.UsageTotals])
    if not totals:
        _say_if_off(client)
    if as_json:
        output.json(raw)
        return
    output.table(
        (by.upper(), "REQUESTS", "PROMPT TOKENS", "ANSWER TOKENS", "ENGINE TIME"),
        [
            (
                one.name or "(none)",
                str(one.requests),
                str(one.prompt_tokens),
                str(one.completion_tokens),
                format_duration(round(one.engine_seconds, 1 if one.engine_seconds < 60 else 0)),
            )
            for one in totals
        ],
    )


def _say_if_off(client: HttpClient) -> None:
    if not client.call("GET", path("engines", "now"), wire.Now).counted:
        output.note("requests are not kept: set telemetry = true in config.toml, and start the daemon again")


def _row(entry: wire.RequestStatus) -> tuple[str, ...]:
    return (
        datetime.fromisoformat(entry.time).astimezone().strftime("%H:%M:%S"),
        f"{entry.status or 'running'}" + (f" {entry.error}" if entry.error else ""),
        entry.model_name or entry.model,
        str(entry.prompt_tokens or ""),
        str(entry.completion_tokens or ""),
        str(entry.tokens_per_second or ""),
        _seconds(entry.queued),
        _seconds(entry.loading),
        _seconds(entry.first_byte),
        _seconds(entry.duration),
        entry.caller,
        entry.request_id,
    )


def _seconds(value: float | None) -> str:
    return f"{value:.2f}s" if value else ""
