"""The commands that make models, and show their parts."""

from pathlib import Path

import click

from modelrunner import lora, modelfile, wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, decode, path
from modelrunner.cli.common_options import json_option, trust_option, with_client
from modelrunner.cli.prepare import pull, pulled
from modelrunner.cli.progressdisplay import follow
from modelrunner.units import format_bytes

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_context_option = click.option(
    "--context-size", type=click.IntRange(1), help="The model's default context size, in tokens."
)


@click.command()
@click.argument("name")
@click.option(
    "--gguf",
    "--file",
    "file",
    type=_FILE,
    help="A GGUF file, or one of several shards, or a file of a backend's format.",
)
@click.option(
    "--safetensors-dir",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder with config.json, model.safetensors (or shards and their index) and the tokenizer's files.",
)
@click.option("--mmproj", type=_FILE, help="The projector of a GGUF model, for images or sound.")
@click.option("--chat-template", "template", type=_FILE, help="A chat template in Jinja, instead of the model's own.")
@click.option(
    "--lora",
    "adapters",
    multiple=True,
    metavar="PATH[:SCALE]",
    help="A LoRA adapter: a GGUF file for --gguf, a PEFT folder for --safetensors-dir. May be given several times.",
)
@click.option(
    "--license", "licences", type=_FILE, multiple=True, help="The text of a licence. May be given several times."
)
@_context_option
@trust_option
@json_option
@with_client()
def package(
    client: HttpClient,
    name: str,
    file: Path | None,
    folder: Path | None,
    mmproj: Path | None,
    template: Path | None,
    adapters: tuple[str, ...],
    licences: tuple[Path, ...],
    context_size: int | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Package a file or a folder as a model.

    The model gets the name NAME. The files are copied; symbolic links are followed.
    """
    source = file or folder
    if source is None or (file and folder):
        raise click.UsageError("give either --gguf or --safetensors-dir")
    if mmproj and not file:
        raise click.UsageError("--mmproj belongs to --gguf: a folder holds all of its model")
    addresses = [place.absolute().as_uri() if place else None for place in (mmproj, template)]
    wanted = wire.PullRequest(
        source.absolute().as_uri(),
        name=name,
        trust_remote_code=trust,
        mmproj=addresses[0],
        chat_template=addresses[1],
        lora=[_address(adapter) for adapter in adapters],
        license=[_text(file) for file in licences],
        context_size=context_size,
    )
    pulled(client, pull(client, wanted), as_json)


def _address(adapter: str) -> str:
    place, scale = lora.split(adapter)
    return f"{Path(place).expanduser().absolute().as_uri()}:{scale:g}"


def _text(file: Path) -> str:
    return modelfile.decoded(file.read_bytes())


@click.command()
@click.argument("name")
@click.option(
    "-f", "--file", "file", type=_FILE, default=Path("Modelfile"), help="The Modelfile; by default ./Modelfile."
)
@trust_option
@json_option
@with_client()
def create(client: HttpClient, name: str, file: Path, trust: bool, as_json: bool) -> None:
    """Make a model with a Modelfile.

    FROM names a model, which is pulled if it is not here, a GGUF file or a folder; SYSTEM, PARAMETER, TEMPLATE (in
    Jinja), ADAPTER, LICENSE and MESSAGE set the values that the model carries.
    """
    recipe = modelfile.parse(_text(file))
    wanted = wire.PullRequest(
        _base(recipe.base, file.parent),
        name=name,
        trust_remote_code=trust,
        system=recipe.system,
        template=recipe.template,
        parameters=recipe.parameters,
        messages=[wire.CarriedMessage(role, content) for role, content in recipe.messages],
        license=list(recipe.licences),
        lora=[_address(str(file.parent / Path(adapter).expanduser())) for adapter in recipe.adapters],
    )
    pulled(client, pull(client, wanted), as_json)


def _base(text: str, folder: Path) -> str:
    """Returns the base: a path if it begins as one, or names a file beside the Modelfile."""
    place = folder / Path(text).expanduser()
    is_path = text.startswith(("./", "../", "/", "~")) or text in (".", "..") or place.exists()
    return place.absolute().as_uri() if is_path else text


@click.command()
@click.argument("model")
@click.argument("name")
@_context_option
@click.option("--system", help="The system prompt for requests that have none.")
@click.option("--chat-template", "template", type=_FILE, help="A chat template in Jinja.")
@click.option("--license", "licences", type=_FILE, multiple=True, help="The text of a licence.")
@click.option("--lora", "adapters", multiple=True, metavar="PATH[:SCALE]", help="A LoRA adapter, as for `package`.")
@json_option
@with_client()
def repackage(
    client: HttpClient,
    model: str,
    name: str,
    context_size: int | None,
    system: str | None,
    template: Path | None,
    licences: tuple[Path, ...],
    adapters: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a model from another one.

    Shared files are stored once.
    """
    wanted = wire.PullRequest(
        model,
        name=name,
        system=system,
        template=_text(template) if template else None,
        license=[_text(file) for file in licences],
        lora=[_address(adapter) for adapter in adapters],
        context_size=context_size,
    )
    if wanted == wire.PullRequest(model, name=name):
        raise click.UsageError("give an option for the change; `modelrunner tag` gives a model another name")
    pulled(client, pull(client, wanted), as_json)


@click.command()
@click.argument("model")
@click.argument("name")
@click.option("--type", "kind", required=True, help="A quantization of the engine's, such as Q4_K_M.")
@click.option("--requantize", is_flag=True, help="Accept a model that is quantized already, and lose more.")
@json_option
@with_client()
def quantize(client: HttpClient, model: str, name: str, kind: str, requantize: bool, as_json: bool) -> None:
    """Make a smaller model from another one.

    The engine's own tool makes it, beside the running engines. Ctrl-C ends it and leaves no files.
    """
    body = wire.QuantizeRequest(name, kind, requantize)
    lines = client.progress(path("models", model, "quantize"), body)
    pulled(client, follow(lines, f"the quantization of {model}").model or name, as_json)


def _metadata(shown: wire.ModelShown) -> dict[str, object]:
    tables = [shown.config.get(form) for form in ("gguf", "safetensors")]
    return next((table for table in tables if isinstance(table, dict)), {})


def _part(shown: wire.ModelShown, part: str) -> str:
    if part == "license":
        return "\n".join(shown.license) or str(_metadata(shown).get("general.license", ""))
    if part == "parameters":
        return "\n".join(f"{name} {value}" for name, value in shown.parameters.items())
    return str(getattr(shown, part) or "")


@click.command()
@click.argument("model")
@click.option("--template", "part", flag_value="template", help="Print only the chat template.")
@click.option("--license", "part", flag_value="license", help="Print only the licences.")
@click.option("--system", "part", flag_value="system", help="Print only the system prompt.")
@click.option("--parameters", "part", flag_value="parameters", help="Print only the defaults for requests.")
@click.option("--modelfile", "part", flag_value="modelfile", help="Print a Modelfile for `modelrunner create`.")
@click.option("--remote", is_flag=True, help="Show the model at its source; nothing is pulled.")
@json_option
@with_client()
def show(client: HttpClient, model: str, part: str | None, remote: bool, as_json: bool) -> None:
    """Show the parts of a model.

    They are its metadata, chat template, licences, and defaults for requests. With --remote the command shows the model
    that a pull would bring, with its revision and its files, as far as its source gives them.
    """
    raw = client.fetch("GET", path("models", model, "show") + ("?remote=true" if remote else ""), timeout=None)
    shown = decode(raw, wire.ModelShown)
    if as_json:
        output.json(raw)
    elif part is not None:
        text = _part(shown, part)
        output.say(text) if text else output.note(f"{model} carries none")
    else:
        values = {key: value for key, value in shown.config.items() if not isinstance(value, dict | list)}
        metadata = _metadata(shown)
        simple = [("id", shown.id)] if shown.id else []
        simple += [("tags", ", ".join(shown.tags))]
        simple += [("version", shown.version)] if shown.version else []
        simple += [(f"file {name}", format_bytes(size)) for name, size in shown.files.items()]
        simple += [(key.replace("_", " "), str(value)) for key, value in sorted(values.items())]
        simple += [(key, str(value)) for key, value in sorted(metadata.items())]
        simple += [(f"parameter {key}", str(value)) for key, value in shown.parameters.items()]
        simple += [("carried context size", str(shown.context_size))] if shown.context_size else []
        simple += [("system", shown.system)] if shown.system else []
        simple += [(f"message of {message.role}", message.content) for message in shown.messages]
        simple += [("template", shown.template_digest)] if shown.template else []
        simple += [("template problem", shown.template_problem)] if shown.template_problem else []
        simple += [("license", text.strip().partition("\n")[0]) for text in shown.license]
        output.fields(simple)
        if shown.template:
            output.say("")
            output.say(output.clean(shown.template))
