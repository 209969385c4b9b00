"""The commands about inference engines."""

import click

from modelrunner.cli import output
from modelrunner.cli.client import HttpClient
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.cli.prepare import install as install_engine
from modelrunner.cli.prepare import is_missing


@click.command()
@click.argument("backend", required=False)
@click.option("--build", is_flag=True, help="Compile it here instead of using a prebuilt one.")
@click.option(
    "--variant", default="", metavar="NAME", help="What llama.cpp computes with: cuda, rocm, vulkan, metal, cpu."
)
@json_option
@with_client()
def install(client: HttpClient, backend: str | None, build: bool, variant: str, as_json: bool) -> None:
    """Install an inference engine.

    BACKEND may be left out if there is only one.
    """
    _do(client, backend or _meant(client, installed=False), as_json, build=build, variant=variant)


@click.command()
@click.argument("backend", required=False)
@click.option("--build", is_flag=True, help="Compile it here instead of using a prebuilt one.")
@json_option
@with_client()
def update(client: HttpClient, backend: str | None, build: bool, as_json: bool) -> None:
    """Update an engine to the version that belongs to this release.

    BACKEND may be left out if only one is installed.
    """
    _do(client, backend or _meant(client, installed=True), as_json, build=build, action="update")


@click.command()
@click.argument("backend")
@json_option
@with_client()
def uninstall(client: HttpClient, backend: str, as_json: bool) -> None:
    """Remove an engine."""
    _do(client, backend, as_json, action="uninstall")


def _do(
    client: HttpClient, backend: str, as_json: bool, *, build: bool = False, variant: str = "", action: str = "install"
) -> None:
    message = install_engine(client, backend, build=build, variant=variant, action=action)
    output.done(message, as_json, backend=backend, message=message)


def _meant(client: HttpClient, *, installed: bool) -> str:
    """Returns the backend that a command without a name means: the only one, or the only one that is installed."""
    statuses = client.call("GET", "/engines/status", dict[str, str])
    candidates = [name for name, status in statuses.items() if not (installed and is_missing(status))]
    if len(candidates) == 1:
        return candidates[0]
    raise click.UsageError(f"name the backend: {', '.join(sorted(statuses)) or 'there is none here'}")
