"""The command batch."""

import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import click
import msgspec

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, RawBody, decode, path
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.cli.progressdisplay import follow
from modelrunner.cli.times import ago
from modelrunner.errors import BadRequest, ModelRunnerError
from modelrunner.wire import Progress

_BATCHES = "/v1/batches"
_OVER = ("completed", "failed", "expired", "cancelled")
_BETWEEN = 0.5  # seconds between two queries of a batch
_PIECE = 1 << 20


class _FirstLine(msgspec.Struct):
    url: str


class _Listed(msgspec.Struct):
    data: list[wire.BatchStatus]


@click.group()
def batch() -> None:
    """Ask many requests of a file, in the capacity that others leave free.

    The file has one JSON object a line, as OpenAI's batches have it: custom_id, method, url and body.
    """


@batch.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--output", "to", type=click.Path(path_type=Path), help="The file for the answers; by default stdout."
)
@click.option("--window", metavar="AGE", default="24h", show_default=True, help="The age at which the batch expires.")
@click.option("-d", "--detach", is_flag=True, help="Print the ID of the batch, and do not wait.")
@with_client()
def run(client: HttpClient, file: Path, to: Path | None, window: str, detach: bool) -> None:
    """Ask the requests of a file, and print the answers.

    Ctrl-C stops watching; the batch goes on. The exit code is 1 if a request got no answer.
    """
    with file.open("rb") as opened:
        uploaded = decode(client.fetch("POST", "/v1/files", _form(file), timeout=None), dict[str, object])
        try:
            endpoint = msgspec.json.decode(opened.readline(), type=_FirstLine).url
        except msgspec.MsgspecError as error:
            raise BadRequest(f"the first line of {file} is not a request of a batch: {error}") from None
    wanted = wire.BatchRequest(str(uploaded["id"]), endpoint, window)
    created = client.call("POST", _BATCHES, wire.BatchStatus, wanted, timeout=None)
    if detach:
        output.say(created.id)
        return
    follow(_watched(client, created), f"batch {created.id}")
    done = client.call("GET", path("v1", "batches", created.id), wire.BatchStatus)
    answered = b""
    if done.output_file_id:
        answered = client.fetch("GET", path("v1", "files", done.output_file_id, "content"), timeout=None)
    if to is not None:
        to.write_bytes(answered)
    elif answered:
        output.say(answered.decode().rstrip("\n"))
    if missing := done.request_counts["total"] - done.request_counts["completed"]:
        where = f"; `modelrunner batch errors {done.id}` shows why" if done.error_file_id else ""
        raise ModelRunnerError(f"the batch is {done.status}, and {missing} requests got no answer{where}")


@batch.command()
@click.argument("id")
@with_client(start=False)
def errors(client: HttpClient, id: str) -> None:
    """Print the requests of a batch that got no answer."""
    shown = client.call("GET", path("v1", "batches", id), wire.BatchStatus)
    if shown.error_file_id:
        output.say(client.fetch("GET", path("v1", "files", shown.error_file_id, "content")).decode().rstrip("\n"))


@batch.command()
@click.argument("id")
@with_client(start=False)
def answers(client: HttpClient, id: str) -> None:
    """Print the answers of a batch that has ended."""
    shown = client.call("GET", path("v1", "batches", id), wire.BatchStatus)
    if shown.output_file_id is None:
        raise ModelRunnerError(
            f"batch {id} is {shown.status}, and has no answers: `modelrunner batch show {id}` shows more"
        )
    output.say(client.fetch("GET", path("v1", "files", shown.output_file_id, "content")).decode().rstrip("\n"))


@batch.command()
@json_option
@with_client(start=False)
def ls(client: HttpClient, as_json: bool) -> None:
    """List the batches, the newest first."""
    raw = client.fetch("GET", path("v1", "batches", limit="1000"))
    if as_json:
        output.json(raw)
    else:
        output.table(("ID", "STATUS", "DONE", "ERRORS", "MADE"), map(_row, decode(raw, _Listed).data))


@batch.command()
@click.argument("id")
@json_option
@with_client(start=False)
def show(client: HttpClient, id: str, as_json: bool) -> None:
    """Show a batch."""
    raw = client.fetch("GET", path("v1", "batches", id))
    if as_json:
        output.json(raw)
        return
    names = ("id", "status", "done", "errors", "made")
    shown = decode(raw, wire.BatchStatus)
    wrong = [("line", f"{e['line']}: {e['message']}") for e in (shown.errors or {}).get("data", [])]
    output.fields([*zip(names, _row(shown), strict=True), *wrong])


@batch.command()
@click.argument("id")
@json_option
@with_client(start=False)
def cancel(client: HttpClient, id: str, as_json: bool) -> None:
    """End a batch: no further request is sent, and the present answers are kept."""
    client.fetch("POST", path("v1", "batches", id, "cancel"))
    output.done(f"cancelled: {id}", as_json, cancelled=id)


def _watched(client: HttpClient, batch: wire.BatchStatus) -> Iterator[Progress]:
    while True:
        counts = batch.request_counts
        done, total = counts["completed"] + counts["failed"], counts["total"]
        if batch.status in _OVER:
            yield Progress("success", f"batch {batch.id}: {batch.status}", total, done)
            return
        yield Progress("progress", f"batch {batch.id}", total, done)
        time.sleep(_BETWEEN)
        batch = client.call("GET", path("v1", "batches", batch.id), wire.BatchStatus)


def _form(file: Path) -> RawBody:
    """Returns the body as multipart/form-data (RFC 7578)."""
    mark = token_hex(16)
    name = file.name.encode("ascii", "replace").replace(b'"', b"_")
    head = (
        b'--%b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\nContent-Type: application/jsonl\r\n\r\n'
    ) % (mark.encode(), mark.encode(), name)
    tail = b"\r\n--%b--\r\n" % mark.encode()

    def pieces() -> Iterator[bytes]:
        yield head
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE):
                yield piece
        yield tail

    size = len(head) + file.stat().st_size + len(tail)
    return RawBody(f"multipart/form-data; boundary={mark}", size, pieces())


def _row(batch: wire.BatchStatus) -> tuple[str, ...]:
    counts = batch.request_counts
    return (
        batch.id,
        batch.status,
        f"{counts['completed']}/{counts['total']}",
        str(counts["failed"]),
        ago(batch.created_at),
    )
