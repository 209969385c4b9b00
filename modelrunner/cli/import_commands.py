"""The command that imports models of other programs."""

from pathlib import Path

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import decode
from modelrunner.cli.common_options import connect, json_option
from modelrunner.cli.progressdisplay import follow
from modelrunner.config.locations import Locations
from modelrunner.units import format_bytes


@click.command()
@click.argument("model", required=False)
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="The new name of the model.")
@click.option("--host", metavar="URL", help="The daemon: unix:///path or http://host:port.")
@json_option
@click.pass_context
def import_model(
    context: click.Context, model: str | None, file: Path | None, name: str | None, host: str | None, as_json: bool
) -> None:
    """Import a model of another program on this machine.

    `modelrunner import llama-swap FILE` prints a configuration of llama-swap as a part of config.toml, and names what
    has no counterpart.

    Without MODEL, the command lists the models of the Hugging Face cache, of Ollama and of LM Studio, with their sizes
    and the cost of an import: a reflink or hard link needs no space, a copy does. Their own files are not changed.
    """
    if model == "llama-swap" and file is not None:
        _import_llama_swap(file)
        return
    if file is not None:
        raise click.UsageError(f"there is nothing to read from a file for {model}; only for llama-swap")
    client = connect(host or context.find_root().params.get("host"), start=True)
    if model is None:
        raw = client.fetch("GET", "/models/import")
        if as_json:
            output.json(raw)
            return
        headings = ("MODEL NAME", "PROGRAM", "SIZE", "COST", "")
        found = decode(raw, list[wire.Importable])
        output.table(
            headings, [(m.name, m.program, format_bytes(m.size), m.cost, "is here" if m.here else "") for m in found]
        )
        return
    last = follow(client.progress("/models/import", wire.ImportRequest(model, name)), f"the import of {model}")
    output.note(last.message)
    output.done(last.model or model, as_json, model=last.model or model)


def _import_llama_swap(file: Path) -> None:
    from modelrunner.cli.llamaswap import MOST_BYTES, converted

    with file.open("rb") as source:
        text, notes = converted(source.read(MOST_BYTES + 1))
    output.say(text.rstrip())
    for line in notes:
        output.note(line)
    output.note(f"append this to {Locations.find().config_file}, then start the daemon again")
