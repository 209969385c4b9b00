"""The commands for models that come and go as files: archives, and models of other programs."""

import sys
from pathlib import Path

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, RawBody, decode, path
from modelrunner.cli.common_options import connect, json_option, trust_option, with_client
from modelrunner.cli.files import check_folder, written
from modelrunner.cli.progressdisplay import follow
from modelrunner.config.locations import Locations
from modelrunner.errors import AnswerBroken
from modelrunner.units import format_bytes

_PIECE = 1 << 20
_TAR = "application/x-tar"


@click.command()
@click.argument("model")
@click.option(
    "-o", "--output", "target", type=click.Path(dir_okay=False, path_type=Path), help="The file; by default stdout."
)
@with_client()
def save(client: HttpClient, model: str, target: Path | None) -> None:
    """Write a model into a tar archive.

    The archive is an OCI image layout: `modelrunner load` reads it, and skopeo as `oci-archive:FILE`. A file appears
    only when it is complete; a pipe or a device gets the archive as it comes.
    """
    if target is None and output.is_terminal(sys.stdout):
        raise click.UsageError("give a file with -o, or send the archive to another program")
    if target is not None:
        check_folder(target)
    with client.open("GET", path("models", model, "export")) as response, written(target) as file:
        wanted, done = int(response.headers.get("Content-Length") or 0), 0
        while piece := client.piece(response):
            file.write(piece)
            done += len(piece)
        if done != wanted:
            raise AnswerBroken(
                f"the archive broke off after {done} of {wanted} bytes: `modelrunner verify {model}` checks whether the"
                " model is damaged"
            )


@click.command()
@click.option(
    "-i",
    "--input",
    "source",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    default="-",
    help="The file; by default stdin.",
)
@click.option("--name", help="The new name of the model, instead of the one in the archive.")
@trust_option
@json_option
@with_client()
def load(client: HttpClient, source: Path, name: str | None, trust: bool, as_json: bool) -> None:
    """Take models from a tar archive.

    The archive is one of `modelrunner save`, or of `skopeo copy ... oci-archive:FILE`. Every byte is verified before a
    model can be seen.
    """
    standard = str(source) == "-"
    if standard and output.is_terminal(sys.stdin):
        raise click.UsageError("give a file with -i, or send the archive from another program")
    with open(sys.stdin.fileno() if standard else source, "rb", closefd=not standard) as file:
        size = None if standard else source.stat().st_size
        body = RawBody(_TAR, size, iter(lambda: file.read(_PIECE), b""))
        route = path("models", "load", name=name, trust="true" if trust else None)
        last = follow(client.progress(route, body), "the load")
    output.note(last.message)
    output.done(last.model or "", as_json, model=last.model)


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
    if model == "llama-swap":
        if file is None:
            raise click.UsageError("name the file of llama-swap's configuration: `modelrunner import llama-swap FILE`")
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
        importable = decode(raw, list[wire.Importable])
        output.table(
            headings,
            [(m.name, m.program, format_bytes(m.size), m.cost, "is here" if m.here else "") for m in importable],
        )
        return
    last = follow(client.progress("/models/import", wire.ImportRequest(model, name)), f"the import of {model}")
    if output.is_terminal(sys.stderr):  # elsewhere its last line said it
        output.note(last.message)
    output.done(last.model or model, as_json, model=last.model or model)


def _import_llama_swap(file: Path) -> None:
    from modelrunner.cli.llamaswap import MOST_BYTES, converted

    with file.open("rb") as source:
        text, notes = converted(source.read(MOST_BYTES + 1))
    output.say(f"\n{text.rstrip()}")  # it is appended to a file whose last line may have no end
    for line in notes:
        output.note(line)
    output.note(f"append this to {Locations.find().config_file}: a daemon that runs reads it by `modelrunner reload`")
