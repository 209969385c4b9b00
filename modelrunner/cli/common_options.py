"""The options that commands share, and the client for `--host`."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from modelrunner.cli.client import HttpClient
from modelrunner.cli.start import address, ensure_running
from modelrunner.config import lockfile
from modelrunner.config.locations import Locations
from modelrunner.errors import BadRequest

Command = Callable[..., Any]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
folder_option = click.option(
    "--to",
    "folder",
    metavar="FOLDER",
    callback=lambda ctx, param, value: os.path.abspath(os.path.expanduser(value)) if value else None,
    help="The one of `model_dirs` in which the model is stored.",
)
trust_option = click.option(
    "--trust-remote-code",
    "trust",
    is_flag=True,
    help="Accept a model that carries code of its own, which its engine will run.",
)


def with_client(*, start: bool = True) -> Callable[[Command], Command]:
    """Adds `--host` and passes the command a `HttpClient` as its first argument. With `start`, the daemon of this data
    directory is started if it does not run; a daemon that `--host` or MODELRUNNER_HOST names is never started."""

    def decorate(command: Command) -> Command:
        @click.option("--host", metavar="URL", help="The daemon: unix:///path or http://host:port.")
        @wraps(command)
        def with_host(*args: Any, host: str | None, **options: Any) -> Any:
            # `--host` may precede the command, too.
            host = host or click.get_current_context().find_root().params.get("host")
            return command(connect(host, start=start), *args, **options)

        return with_host

    return decorate


def connect(host: str | None, *, start: bool) -> HttpClient:
    """Returns a client of the daemon at `host`, by default the daemon that the environment or the configuration
    names."""

    def client_of(address: str) -> HttpClient:
        try:
            return HttpClient(address, key=os.environ.get("MODELRUNNER_API_KEY"))
        except BadRequest as error:
            raise click.UsageError(error.message) from None

    if host:
        return client_of(host)
    locations = Locations.find()
    if locations.host != f"unix://{locations.socket}":
        return client_of(locations.host)  # a daemon other than this data directory's
    return ensure_running(locations, client_of) if start else client_of(address(locations))


def absent(client: HttpClient) -> Locations | None:
    """Returns the places of this user's daemon, if that is the one which the client asks and none runs."""
    locations = Locations.find()
    is_ours = client.host == f"unix://{locations.socket}"
    return locations if is_ours and lockfile.holder(locations.data) is None else None
