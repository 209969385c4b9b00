"""The command that imports models of other programs."""

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import Client, decode
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.cli.progressdisplay import follow
from modelrunner.units import format_bytes


@click.command()
@click.argument("model", required=False)
@click.option("--name", help="The new name of the model.")
@json_option
@with_client()
def import_model(client: Client, model: str | None, name: str | None, as_json: bool) -> None:
    """Import a model of another program on this machine.

    Without MODEL, the command lists the models of the Hugging Face cache, of Ollama and of LM Studio, with their sizes
    and the cost of an import: a reflink or hard link needs no space, a copy does. Their own files are not changed.
    """
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
