"""The base of the hubs: a repository's list of files, and the choice of one model's files from it."""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import msgspec

from modelrunner import __version__, wire
from modelrunner.errors import InvalidReference, ModelNotFound, SourceFailed
from modelrunner.pull.selection import choose, folder_files
from modelrunner.store.references import DEFAULT_TAG, Reference
from modelrunner.types import ModelFormat
from modelrunner.web.attempt import refused
from modelrunner.web.partial import RemoteFile
from modelrunner.web.session import HubAnswer, ask, new_client, retry_after

if TYPE_CHECKING:
    import httpx

LONGEST_LISTING = 8 << 20
FileSize = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_REPOSITORY = re.compile(r"[^/]+/(?P<repository>[^/:@]+/[^/:@]+)[^/]*")


@dataclass(frozen=True, slots=True)
class Listing:
    """The chosen files by their names inside the bundle. `commit` is the state of the repository that they belong to;
    `licence` is the hub's name for the licence, "" if it gives none."""

    files: Mapping[str, RemoteFile]
    commit: str
    licence: str = ""

    @property
    def digests(self) -> dict[str, str]:
        """Returns the sha256 of the files for which the hub has one."""
        return {name: file.sha256 for name, file in self.files.items() if file.sha256 is not None}

    @property
    def revision(self) -> str:
        listed = [(name, file.digest) for name, file in self.files.items()]
        return hashlib.sha256(repr(listed).encode()).hexdigest()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True, slots=True)
class RepositoryName:
    """A repository and a choice in it. `path` is `ORG/REPO` in the case it was written in. `wanted` is a quantization,
    None for the default; `revision` is a branch, tag or commit, "" for the main branch. `str()` is for messages."""

    host: str
    path: str
    wanted: str | None
    revision: str

    def __str__(self) -> str:
        return f"{self.host}/{self.path}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a name. Raises `InvalidReference`."""
        reference, match = Reference.parse(text), _REPOSITORY.fullmatch(text)
        if match is None or reference.digest is not None:
            raise InvalidReference(f"{text!r} does not name a model on a hub: write {reference.host}/ORG/REPO[:QUANT]")
        wanted = None if reference.tag.lower() == DEFAULT_TAG else reference.tag
        return cls(reference.host, match["repository"], wanted, reference.revision)


class Hub(ABC):
    """One hub, with credentials; it must answer within `limit` seconds. `variable` is the environment variable of its
    token. The constructor blocks (it reads certificates and the token)."""

    variable: ClassVar[str]

    def __init__(
        self, endpoint: str | None, token: str | None, transport: "httpx.AsyncBaseTransport | None", limit: float
    ) -> None:
        self.endpoint = (endpoint or self.usual_endpoint()).rstrip("/")
        token = token or self.usual_token()
        self._limit = limit
        authorization = {"Authorization": f"Bearer {token}"} if token else {}
        self.headers: Mapping[str, str] = {"User-Agent": f"modelrunner/{__version__}", **authorization}
        self.client = new_client(self.endpoint, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    @abstractmethod
    def usual_endpoint(self) -> str:
        """Returns the default address of the hub."""

    @abstractmethod
    def usual_token(self) -> str | None:
        """Returns the token of the daemon's user."""

    @abstractmethod
    async def list(self, text: str, *, trust: bool) -> Listing:
        """Returns the files of the model `text`; code files only with `trust`. Raises the errors of `Source.fetch`."""

    async def search(self, query: str, format: ModelFormat, limit: int) -> Sequence[wire.Offer]:
        """Searches as `Source.search` does."""
        return ()

    async def ranged(self, file: RemoteFile, range: str, limit: int) -> HubAnswer:
        """Returns a part of a file (remoteheader.py)."""
        return await ask(self.client, file.url, {**self.headers, "Range": range}, limit=limit, seconds=self._limit)

    async def text(self, file: RemoteFile, limit: int) -> str:
        """Returns a small file as text; "" for a file of more than `limit` bytes. Raises `SourceFailed`."""
        if file.size > limit:
            return ""
        answer = await self.get(file.url, limit)
        self.require_found(answer, file.name)
        return answer.body.decode("utf-8", "replace")

    async def get(self, url: str, limit: int = LONGEST_LISTING) -> HubAnswer:
        return await ask(self.client, url, self.headers, limit=limit, seconds=self._limit)

    def require_found(self, answer: HubAnswer, place: str) -> None:
        """Raises the error that a status other than 200 means."""
        code = answer.headers.get("x-error-code")
        missing = f"{place} is not on the hub, or it is private: check its name, or set {self.variable}"
        match answer.status:
            case 200:
                return
            case 404:
                raise ModelNotFound(missing)
            case 401 | 403 if code == "GatedRepo":
                raise refused(place, answer.headers)
            case 401 if code in (None, "RepoNotFound"):  # also the hub's answer for a repository that does not exist
                raise ModelNotFound(missing)
            case 401 | 403:
                raise refused(place, answer.headers)
            case 429 | 503 as status:
                wait = retry_after(answer.headers.get("retry-after"))
                raise SourceFailed(f"{place}: the hub answered {status}; pull again later", retry_after=wait)
            case status:
                raise SourceFailed(f"{place}: the hub answered {status}")


def chosen_files(names: Sequence[str], repository: RepositoryName, *, trust: bool) -> dict[str, str]:
    """Returns the names in the repository by the names in the bundle."""
    has_gguf = any(name.lower().endswith(".gguf") for name in names)
    folder = folder_files(names, trust=trust) if repository.wanted is None and not has_gguf else []
    return {name: name for name in folder} or choose(names, repository.wanted, str(repository))
