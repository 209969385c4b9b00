"""The command keys, which makes and removes API keys."""

import sys

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, decode, path
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.cli.times import until

_HEADINGS = ("NAME", "SCOPES", "MODELS", "LIMITS", "PRIORITY", "EXPIRES")


@click.group()
def keys() -> None:
    """Make and revoke API keys.

    Once there is a key, every request over TCP needs one; the Unix socket stays open to its owner. A daemon without
    keys listens on loopback only.
    """


@keys.command()
@click.argument("name")
@click.option("--scope", metavar="LIST", default="inference", show_default=True, help="inference, models, admin.")
@click.option("--model", "models", metavar="PATTERN", multiple=True, help="Allow only these models, such as ai/*.")
@click.option("--requests-per-minute", type=click.IntRange(1), metavar="N", help="The most requests in any 60 seconds.")
@click.option(
    "--tokens-per-minute", type=click.IntRange(1), metavar="N", help="The most tokens of prompts and answers."
)
@click.option("--max-tokens", type=click.IntRange(1), metavar="N", help="The most tokens of one answer.")
@click.option(
    "--max-seconds",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="The most seconds of work on one request.",
)
@click.option("--concurrency", type=click.IntRange(1), metavar="N", help="The most requests at the same time.")
@click.option(
    "--priority",
    type=click.Choice(["normal", "batch"]),
    default="normal",
    help="With batch, requests of other keys go first.",
)
@click.option("--expires", metavar="AGE", help="The lifetime, such as 30d; unlimited by default.")
@json_option
@with_client()
def create(
    client: HttpClient,
    name: str,
    scope: str,
    models: tuple[str, ...],
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    max_tokens: int | None,
    max_seconds: float | None,
    concurrency: int | None,
    priority: str,
    expires: str | None,
    as_json: bool,
) -> None:
    """Make a key, and print its text.

    The text is shown only once: the daemon keeps only its digest.
    """
    wanted = {
        "name": name,
        "scopes": [word.strip() for word in scope.split(",") if word.strip()],
        "models": list(models),
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency,
        "max_tokens": max_tokens,
        "max_seconds": max_seconds,
        "priority": priority,
        "expires": expires,
    }
    _show(client.fetch("POST", "/keys", wanted), as_json)


@keys.command()
@click.argument("name")
@json_option
@with_client()
def rotate(client: HttpClient, name: str, as_json: bool) -> None:
    """Give a key a new text; the old one is refused at once."""
    _show(client.fetch("POST", path("keys", name, "rotate")), as_json)


@keys.command()
@click.argument("name")
@click.option("--open", "is_open", is_flag=True, help="Also the last key: then TCP is open to everybody.")
@json_option
@with_client()
def revoke(client: HttpClient, name: str, is_open: bool, as_json: bool) -> None:
    """Remove a key."""
    client.fetch("DELETE", path("keys", name, open="true" if is_open else None))
    output.done(f"revoked: {name}", as_json, revoked=name)


@keys.command()
@json_option
@with_client()
def ls(client: HttpClient, as_json: bool) -> None:
    """List the keys, without their texts."""
    raw = client.fetch("GET", "/keys")
    if as_json:
        output.json(raw)
    else:
        output.table(_HEADINGS, map(_row, decode(raw, list[wire.KeyStatus])), expendable=("PRIORITY", "MODELS"))


def _show(raw: bytes, as_json: bool) -> None:
    if as_json:
        output.json(raw)
        return
    if output.is_terminal(sys.stderr):
        output.note("keep this text: it is not shown again")
    output.say(decode(raw, wire.KeyCreated).text)


def _row(key: wire.KeyStatus) -> tuple[str, ...]:
    limits = (
        (key.requests_per_minute, "requests/min"),
        (key.tokens_per_minute, "tokens/min"),
        (key.concurrency, "at once"),
        (key.max_tokens, "tokens each"),
        (key.max_seconds, "s each"),
    )
    return (
        key.name,
        ",".join(key.scopes),
        ",".join(key.models) or "all",
        ", ".join(f"{count:g} {unit}" for count, unit in limits if count) or "none",
        key.priority,
        "expired" if key.expired else until(key.expires) if key.expires else "never",
    )
