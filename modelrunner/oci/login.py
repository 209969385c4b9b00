"""Tries a user and password at a registry before they are stored."""

from modelrunner.errors import SourceFailed
from modelrunner.oci.credentials import Credential, Credentials
from modelrunner.oci.registries import Registries
from modelrunner.oci.repository import RemoteRepository


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
