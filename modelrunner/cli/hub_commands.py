"""The commands that ask the sources of models for their offers and for newer models."""

import click
import msgspec

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, decode, path
from modelrunner.cli.common_options import json_option, with_client

_STATES = {True: "newer at its source", False: "up to date", None: "unknown"}


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="WORD...")
@click.option("--format", type=click.Choice(["gguf", "safetensors"]), default="gguf", show_default=True)
@click.option(
    "-n", "--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="The most models to show."
)
@json_option
@with_client()
def search(client: HttpClient, words: tuple[str, ...], format: str, limit: int, as_json: bool) -> None:
    """Find models on Hugging Face."""
    raw = client.fetch(
        "GET", path("models", "search", q=" ".join(words), format=format, limit=str(limit)), timeout=None
    )
    if as_json:
        output.json(raw)
        return
    rows = [
        (each.name, f"{each.downloads:,}", f"{each.likes:,}", each.task, "gated" if each.gated else "")
        for each in decode(raw, list[wire.Offer])
    ]
    output.table(("MODEL NAME", "DOWNLOADS", "LIKES", "TASK", ""), rows, expendable=("LIKES", "TASK"))


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL...]")
@json_option
@with_client()
def check_update(client: HttpClient, models: tuple[str, ...], as_json: bool) -> None:
    """Ask whether the sources of models have newer ones.

    Without MODEL, all pulled models are checked. A new commit that changes none of a model's files does not count.
    """
    asked = [path("updates", model=model) for model in models or [None]]
    found = [each for place in asked for each in client.call("GET", place, list[wire.Update], timeout=None)]
    if as_json:
        output.json(msgspec.json.encode(found))
        return
    rows = [(each.name, _STATES[each.newer], each.reason) for each in found]
    output.table(("MODEL NAME", "STATE", ""), rows)
