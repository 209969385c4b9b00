"""The commands about models on disk."""

import re
import sys
from pathlib import Path

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, decode, path
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.cli.progressdisplay import follow
from modelrunner.cli.several import each
from modelrunner.cli.times import ago
from modelrunner.units import format_bytes

_SHOWN_DIGITS = 12
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("model")
@click.argument("target", required=False, metavar="[NAME]")
@click.option(
    "--sign",
    "key",
    type=_FILE,
    help="Sign the model there with this private key (ECDSA P-256, PEM).",
)
@json_option
@with_client()
def push(client: HttpClient, model: str, target: str | None, key: Path | None, as_json: bool) -> None:
    """Send a model to a registry.

    NAME is HOST/REPOSITORY[:TAG], by default the model's own name. Files that the registry has are not sent.
    """
    signing = str(key.absolute()) if key else None
    last = follow(
        client.progress(path("models", model, "push"), wire.PushRequest(target, sign=signing)), f"push of {model}"
    )
    output.done(last.model or model, as_json, model=last.model or model)


@click.command()
@click.option("-q", "--quiet", is_flag=True, help="Print only the names.")
@json_option
@with_client()
def list_models(client: HttpClient, quiet: bool, as_json: bool) -> None:
    """List the models on this machine.

    Pull a damaged model again to heal it, or remove it.
    """
    raw = client.fetch("GET", "/models")
    models = decode(raw, list[wire.Model])
    if as_json:
        output.json(raw)
    elif quiet:
        for model in models:
            for name in model.tags or [model.id]:
                output.say(name)
    else:
        checked = any(model.check for model in models)
        columns = ("PARAMETERS", "QUANTIZATION", "ARCHITECTURE", "CAPABILITIES", "CONTEXT", *["CHECK"] * checked)
        headings = ("MODEL NAME", *columns, "MODEL ID", "CREATED", "SIZE")
        expendable = ("CAPABILITIES", "CREATED", "ARCHITECTURE", "MODEL ID", "CONTEXT", "PARAMETERS")
        output.table(headings, [row for model in models for row in _rows(model, checked)], expendable=expendable)
        if not models and output.is_terminal(sys.stdout):
            output.note("no model is here yet: `modelrunner run` offers the starter, `modelrunner pull` gets others")
        if any(model.damage for model in models):
            for fault in filter(None, client.call("GET", "/version", wire.Status).model_dirs.values()):
                output.note(fault)


@click.command()
@click.argument("model")
@json_option
@with_client()
def inspect(client: HttpClient, model: str, as_json: bool) -> None:
    """Show the details of a model."""
    raw = client.fetch("GET", path("models", model))
    shown = decode(raw, wire.Model)
    if as_json:
        output.json(raw)
    else:
        simple = [(k.replace("_", " "), str(v)) for k, v in shown.config.items() if not isinstance(v, dict | list)]
        simple += [("capabilities", ", ".join(shown.capabilities))] if shown.capabilities else []
        simple += [("context window", str(shown.context_window))] if shown.context_window else []
        simple += [("check", _check(shown.check))] if shown.check else []
        simple += [("from", f"{origin.source} {origin.version}".strip()) for origin in shown.origins]
        simple += [("lora", _adapter(adapter)) for adapter in shown.adapters]
        output.fields(
            [("id", shown.id), ("tags", ", ".join(shown.tags)), ("created", ago(shown.created)), *sorted(simple)]
        )


@click.command()
@click.argument("model")
@click.argument("name")
@json_option
@with_client()
def tag(client: HttpClient, model: str, name: str, as_json: bool) -> None:
    """Give a model another name."""
    repository, _, label = name.rpartition(":")
    if not repository or "/" in label:  # no tag, or only the port of a registry
        repository, label = name, ""
    client.fetch("POST", path("models", model, "tag", repo=repository, tag=label or "latest"))
    output.done(name, as_json, model=name)


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("-f", "--force", is_flag=True, help="Remove it even if it is in use or has several names.")
@json_option
@with_client()
def remove(client: HttpClient, models: tuple[str, ...], force: bool, as_json: bool) -> int:
    """Remove models.

    MODEL is a whole name or an ID. Removing the last name removes the model; files that other models share stay.
    """

    def remove_one(model: str) -> None:
        raw = client.fetch("DELETE", path("models", model, force="true" if force else None), timeout=None)
        for change in decode(raw, list[dict[str, str]]):
            for what, name in change.items():
                output.done(f"{what}: {name}", as_json, **{what: name})

    return each(models, remove_one)


@click.command()
@click.argument("model")
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
@with_client()
def move(client: HttpClient, model: str, folder: Path, as_json: bool) -> None:
    """Move a model to another folder of models.

    FOLDER is one of model_dirs, or the data directory. The model is copied and checked there before it goes from where
    it was.
    """
    target = str(folder.absolute())
    lines = client.progress(path("models", model, "move"), wire.MoveRequest(target))
    output.done(follow(lines, f"the move of {model}").message, as_json, model=model, folder=target)


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL...]")
@json_option
@with_client()
def verify(client: HttpClient, models: tuple[str, ...], as_json: bool) -> int:
    """Read every byte of models, and report damaged ones.

    Without MODEL, all models are read. Pulling or packaging a damaged model again heals it. The exit code is 1 if a
    model is damaged.
    """

    def verify_one(model: str) -> None:
        lines = client.progress(path("models", model, "verify"), None)
        message = follow(lines, f"the verification of {model}").message
        output.done(message, as_json, model=model, message=message)

    here = [] if models else client.call("GET", "/models", list[wire.Model])
    return each(models or [model.name for model in here if model.config.get("format") != "declared"], verify_one)


def _adapter(adapter: wire.AppliedAdapter) -> str:
    return f"{adapter.name} (scale {adapter.scale:g}, {format_bytes(adapter.size)})"


def _rows(model: wire.Model, checked: bool) -> list[tuple[str, ...]]:
    """Returns a row for each name, with the mark of a check in a list where one is `checked`."""
    figures = [str(model.config.get(key) or "") for key in ("parameters", "quantization", "architecture")]
    if "damage" in model.config:
        figures[-1] = "damaged"
    digits = model.id.rpartition(":")[2][:_SHOWN_DIGITS]
    able = [name for name in model.capabilities if name != "completion" or "chat" not in model.capabilities]
    size = "damaged" if model.damage else _size(str(model.config.get("size") or ""))
    mark = (_check(model.check),) if checked else ()
    window = str(model.context_window or "")
    rest = (*figures, " ".join(able), window, *mark, digits, ago(model.created), size)
    names = [*(model.tags or ["<none>"]), *(f"{alias} (alias)" for alias in model.aliases)]
    return [(name, *rest) for name in names]


def _check(check: wire.ModelCheck | None) -> str:
    if check is None:
        return ""
    return f"failed {len(check.failed)} of {check.passed + len(check.failed)}" if check.failed else "passed"


def _size(size: str) -> str:
    """Returns the size as text: others publish it as a number of bytes."""
    return format_bytes(int(size)) if re.fullmatch("[0-9]{1,18}", size) else size
