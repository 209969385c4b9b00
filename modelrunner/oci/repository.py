"""One repository of a registry: its manifests and blobs over the distribution API
(https://github.com/opencontainers/distribution-spec/blob/main/spec.md)."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from modelrunner.concurrency.threads import in_thread
from modelrunner.errors import ModelNotFound, ModelRunnerError, SourceFailed
from modelrunner.oci.authorization import AGENT, Authorizer, same_origin
from modelrunner.oci.credentials import Credentials
from modelrunner.oci.registries import RegistryEndpoint
from modelrunner.store import Digest
from modelrunner.store.manifests import LARGEST, StoredFile
from modelrunner.store.mediatypes import MANIFEST_TYPE
from modelrunner.web.download import Downloader
from modelrunner.web.partial import RemoteFile
from modelrunner.web.session import LOOK_UP_LIMIT, HubAnswer, ask, new_client, retry_after, trusted_certificates

if TYPE_CHECKING:
    import httpx

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
INDEX_TYPES = (INDEX_TYPE, "application/vnd.docker.distribution.manifest.list.v2+json")
_ACCEPT = ", ".join((MANIFEST_TYPE, "application/vnd.docker.distribution.manifest.v2+json", *INDEX_TYPES))
_BUSY = (429, 502, 503, 504)
_ATTEMPTS = 4
_LONGEST_PAUSE = 30.0
_LARGEST_ERROR = 1 << 16
Pause = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RemoteManifest:
    """A manifest or an image index, byte for byte."""

    data: bytes
    media_type: str

    @property
    def digest(self) -> Digest:
        return Digest.of(self.data)


@dataclass(frozen=True, slots=True)
class Manner:
    """The manner of requests to registries. `pause` waits between attempts; `look_up_limit` is in seconds; `patience`
    is the downloader's; files larger than `chunk` bytes are sent in chunks."""

    pause: Pause = asyncio.sleep
    look_up_limit: float = LOOK_UP_LIMIT
    patience: float = 60.0
    chunk: int = 64 << 20


class RemoteRepository:
    """A repository, `path` at the endpoint. The methods raise `SourceFailed`, and `ModelNotFound` for content that the
    registry does not have. Use it as an async context manager."""

    def __init__(
        self,
        client: "httpx.AsyncClient",
        endpoint: RegistryEndpoint,
        path: str,
        authorizer: Authorizer,
        manner: Manner,
        actions: str = "pull",
        sources: Sequence[str] = (),
    ) -> None:
        self.client, self.endpoint, self.path, self.manner = client, endpoint, path, manner
        self._authorizer = authorizer
        scopes = [f"repository:{path}:{actions}" if path else "", *(f"repository:{source}:pull" for source in sources)]
        self.scope = " ".join(scopes)

    @classmethod
    async def open(
        cls,
        endpoint: RegistryEndpoint,
        path: str,
        credentials: Credentials,
        *,
        token: str | None = None,
        manner: Manner | None = None,
        actions: str = "pull",
        sources: Sequence[str] = (),
    ) -> Self:
        """Returns the opened repository. `token` replaces other credentials; `actions` are those of the token's scope,
        which also lets files be read from the repositories `sources`."""
        manner = manner or Manner()
        client = await in_thread(lambda _: _client(endpoint))
        authorizer = Authorizer(client, endpoint, credentials, token, manner.look_up_limit)
        return cls(client, endpoint, path, authorizer, manner, actions, sources)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    def url(self, what: str) -> str:
        return f"{self.endpoint.url}/v2/{self.path}/{what}"

    async def manifest(self, reference: str) -> RemoteManifest:
        """Returns the manifest of a tag or of a digest (`sha256:HEX`); content with another digest raises
        `SourceFailed`."""
        answer = await self.request("GET", self.url(f"manifests/{reference}"), {"Accept": _ACCEPT}, limit=LARGEST)
        self.require(answer, 200, f"{self.path}:{reference}".replace(":sha256:", "@sha256:"))
        media_type = answer.headers.get("content-type", "").partition(";")[0].strip()
        manifest = RemoteManifest(answer.body, media_type)
        if reference.startswith("sha256:") and str(manifest.digest) != reference:
            raise SourceFailed(f"{self.endpoint.host} sent another manifest than {reference}: pull again later")
        return manifest

    async def put_manifest(self, data: bytes, media_type: str, reference: str) -> None:
        """Uploads the manifest under the tag or digest `reference`; the repository has all files that it names."""
        url = self.url(f"manifests/{reference}")
        answer = await self.request("PUT", url, {"Content-Type": media_type}, content=data)
        self.require(answer, 201, f"{self.path}:{reference}")

    def remote_file(self, file: StoredFile) -> RemoteFile:
        return RemoteFile(f"file {file.digest}"[:24], self.url(f"blobs/{file.digest}"), file.size, file.digest.hex)

    def downloader(self) -> Downloader:
        return Downloader(
            self.client,
            self.authorization(),
            renew=self.renew,
            pause=self.manner.pause,
            patience=self.manner.patience,
        )

    async def blob(self, file: StoredFile, limit: int) -> bytes:
        """Returns the content of a small blob. Raises `SourceFailed` for content of another digest, or of more than
        `limit` bytes."""
        answer = await self.request("GET", self.url(f"blobs/{file.digest}"), {}, limit=min(file.size, limit))
        self.require(answer, 200, f"a part of {self.path}")
        if Digest.of(answer.body) != file.digest:
            raise SourceFailed(f"{self.endpoint.host} sent other content than {file.digest}: pull again later")
        return answer.body

    def authorization(self) -> dict[str, str]:
        """Returns the headers for the registry's own origin."""
        return self._authorizer.headers(self.scope)

    def authorization_for(self, url: str) -> dict[str, str]:
        """Returns the headers for an address that the registry named: no credentials for another origin."""
        return self.authorization() if same_origin(url, self.endpoint.url) else dict(AGENT)

    async def renew(self, url: str, headers: Mapping[str, str]) -> dict[str, str] | None:
        """Returns better credentials after an answer with status 401, or None."""
        return await self._authorizer.renew(self.scope, url, headers)

    async def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        *,
        limit: int = _LARGEST_ERROR,
        content: bytes | None = None,
    ) -> HubAnswer:
        """Returns the answer, of at most `limit` bytes; a busy registry is asked again. The caller checks the
        status."""
        authorized = attempt = 0
        while True:
            answer = await ask(
                self.client,
                url,
                {**headers, **self.authorization()},
                limit=max(limit, _LARGEST_ERROR),
                method=method,
                redirects=method in ("GET", "HEAD"),
                seconds=self.manner.look_up_limit,
                content=content,
            )
            if answer.status == 401 and not authorized and await self.renew(answer.url, answer.headers) is not None:
                authorized += 1
                continue
            pause = retry_after(answer.headers.get("retry-after"))
            attempt += 1
            if answer.status not in _BUSY or attempt == _ATTEMPTS or (pause or 0) > _LONGEST_PAUSE:
                return answer
            await self.manner.pause(pause if pause is not None else 2.0**attempt)

    def require(self, answer: HubAnswer, status: int, what: str) -> None:
        """Raises the error that a status other than `status` means. The registry's own text is never shown."""
        host = self.endpoint.host
        if answer.status == status:
            return
        raise self._failure(answer, f"{host}/{what}", host)

    def _failure(self, answer: HubAnswer, what: str, host: str) -> ModelRunnerError:
        if answer.status == 404 or (answer.status in (401, 403) and self._authorizer.anonymous):
            return ModelNotFound(
                f"{what} is not there, or it is private: look at its name, or log in with `modelrunner login {host}`"
            )
        if answer.status in (401, 403):
            return SourceFailed(
                f"{host} refuses this user access to {what}: log in as another user with `modelrunner login {host}`"
            )
        wait = retry_after(answer.headers.get("retry-after"))
        return SourceFailed(f"{what}: the registry answered {answer.status}; try again later", retry_after=wait)


def _client(endpoint: RegistryEndpoint) -> "httpx.AsyncClient":
    context = None
    if (ca := endpoint.rules.ca) is not None:
        try:
            context = trusted_certificates(besides=ca)
        except OSError as error:
            raise SourceFailed(f"the certificates in {ca} cannot be used: {error.strerror or error}") from None
    return new_client(endpoint.url, context=context, named=endpoint.named, by_client=True)
