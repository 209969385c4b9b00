"""The options that commands share, and the way from `--host` to a client."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from modelrunner.client import Client
from modelrunner.errors import BadRequest
from modelrunner.locations import Locations

Command = Callable[..., Any]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def with_client(*, start: bool = True) -> Callable[[Command], Command]:
    """Adds `--host` and hands the command a `Client` as its first argument. With `start`, the daemon of this data
    directory is started if it does not run; one that `--host` or MODELRUNNER_HOST names is somebody else's to start."""

    def decorate(command: Command) -> Command:
        @click.option("--host", metavar="URL", help="The daemon: unix:///path or http://host:port.")
        @wraps(command)
        def with_host(*args: Any, host: str | None, **options: Any) -> Any:
            host = host or click.get_current_context().find_root().params.get("host")  # it may stand in front, too
            return command(connect(host, start=start), *args, **options)

        return with_host

    return decorate


def connect(host: str | None, *, start: bool) -> Client:
    """A client of the daemon at `host`, by default the one that the environment or the configuration names."""
    locations = None if host else Locations.find()
    try:
        client = Client(host or locations.host, key=os.environ.get("MODELRUNNER_API_KEY"))  # type: ignore[union-attr]
    except BadRequest as error:
        raise click.UsageError(error.message) from None
    if start and locations and locations.host == f"unix://{locations.socket}":
        from modelrunner.cli.start import ensure_running

        ensure_running(locations, client)
    return client
