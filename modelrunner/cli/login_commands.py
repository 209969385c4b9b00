"""The commands `login` and `logout`: the passwords of registries, which the daemon reads at its next pull or push."""

import asyncio
import sys

import click

from modelrunner.cli import output
from modelrunner.config.locations import Locations
from modelrunner.config.settings import Settings
from modelrunner.errors import SourceFailed
from modelrunner.oci.credentials import Credential, Credentials
from modelrunner.oci.registries import HUB, Registries, RegistryRules
from modelrunner.oci.repository import RemoteRepository

_host = click.argument("host", default=HUB, metavar="[HOST]")


@click.command()
@_host
@click.option("-u", "--user", help="The name of the user.")
@click.option("--password-stdin", "piped", is_flag=True, help="Read the password from standard input.")
def login(host: str, user: str | None, piped: bool) -> None:
    """Keep the user and password of a registry.

    HOST is docker.io by default. The login is tried at the registry first, and kept in a file that only you can read,
    beside the configuration file. Without a login here, docker's own is used.
    """
    if user is None:
        if piped:
            raise click.UsageError("--password-stdin needs --user")
        user = click.prompt("User", err=True)
    password = sys.stdin.read().rstrip("\r\n") if piped else click.prompt("Password", hide_input=True, err=True)
    if not user or ":" in user or not password:
        raise click.UsageError("give a user without a colon, and a password")
    locations, host = Locations.find(), host.lower()
    tables = Settings.load(locations).registries
    registries = Registries({name: RegistryRules(**table.model_dump()) for name, table in tables.items()})
    credential = Credential(user, password)
    asyncio.run(check(registries, host, credential))
    Credentials(locations.logins).store(host, credential)
    output.say(f"logged in to {host}")


@click.command()
@_host
def logout(host: str) -> None:
    """Forget the user and password of a registry.

    HOST is docker.io by default. Docker's own login stays.
    """
    Credentials(Locations.find().logins).forget(host.lower())
    output.say(f"logged out of {host.lower()}")


class _TypedCredentials(Credentials):
    """Holds only the typed credential."""

    def __init__(self, credential: Credential) -> None:
        self._credential = credential

    async def find(self, host: str) -> Credential | None:
        return self._credential


async def check(registries: Registries, host: str, credential: Credential) -> None:
    """Returns if the registry accepts the login. Raises `SourceFailed` if it refuses it, or cannot be asked."""
    endpoint = registries.origin(host)
    async with await RemoteRepository.open(endpoint, "", _TypedCredentials(credential)) as repository:
        answer = await repository.request("GET", f"{endpoint.url}/v2/", {})
        if answer.status in (401, 403):
            raise SourceFailed(f"{host} refuses the user or the password")
        if answer.status != 200:
            raise SourceFailed(f"{host} answered {answer.status}, which is not a registry's answer: check its name")
