"""The API of a Hugging Face hub (https://huggingface.co/docs/hub/api): which files a repository has, with their sizes
and digests, and the header of one of them. One request lists the files.

The settings are huggingface_hub's (HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE). The requests are our own: its
client follows redirects to any address and has no limit for a whole answer.
"""

import contextlib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self
from urllib.parse import quote, urlencode

import msgspec

from modelrunner import __version__
from modelrunner.concurrency.threads import in_thread
from modelrunner.errors import InvalidModel, InvalidReference, ModelNotFound, SourceFailed
from modelrunner.pull.selection import choose, folder_files
from modelrunner.store.gguf import read_header
from modelrunner.store.references import DEFAULT_TAG, Reference
from modelrunner.types import FoundModel, ModelFormat, ModelHeader
from modelrunner.web.attempt import refused
from modelrunner.web.partial import RemoteFile
from modelrunner.web.session import HubAnswer, ask, new_client, retry_after

if TYPE_CHECKING:
    import httpx

_TEXT = re.compile(r"(?:hf\.co|(?:www\.)?huggingface\.co)/(?P<repository>[^/:@]+/[^/:@]+)[^/]*", re.I)
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_REPOSITORY = re.compile(r"[A-Za-z0-9._-]{1,96}/[A-Za-z0-9._-]{1,96}")
_LONGEST_LISTING = 8 << 20
# Bytes in which the header of a GGUF file is looked for, one after the other: 256,000 tokens of vocabulary take 10 MB.
_HEADERS = (2 << 20, 8 << 20, 24 << 20)
_FILLING = b"\xff" * (8 << 20)

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _LfsFile(msgspec.Struct, frozen=True):
    """A file that git keeps elsewhere (LFS)."""

    sha256: str
    size: _Size


class _Sibling(msgspec.Struct, frozen=True, rename={"name": "rfilename", "blob": "blobId"}):
    name: str
    size: _Size | None = None
    blob: str | None = None
    lfs: _LfsFile | None = None


class _SearchResult(msgspec.Struct, frozen=True, rename={"task": "pipeline_tag"}):
    id: str
    downloads: int = 0
    likes: int = 0
    task: str | None = None
    gated: bool | str = False


class _Repository(msgspec.Struct, frozen=True):
    sha: str
    siblings: list[_Sibling]


@dataclass(frozen=True, slots=True)
class Listing:
    """The chosen files by their names inside the bundle."""

    files: Mapping[str, RemoteFile]
    commit: str

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of the files that the hub has one of."""
        return {name: file.sha256 for name, file in self.files.items() if file.sha256 is not None}

    @property
    def revision(self) -> str:
        listed = [(name, file.digest) for name, file in self.files.items()]
        return hashlib.sha256(repr(listed).encode()).hexdigest()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class Hub:
    """One hub, with credentials. Blocks when it is made (certificates and the file with the token are read)."""

    def __init__(
        self, endpoint: str | None, token: str | None, transport: "httpx.AsyncBaseTransport | None", limit: float
    ) -> None:
        from huggingface_hub import constants, get_token

        self._endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._offline = constants.HF_HUB_OFFLINE
        self._limit = limit
        token = token or (None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token())
        # huggingface_hub's own headers are not taken: making them asks the hub a question by its own client.
        authorization = {"Authorization": f"Bearer {token}"} if token else {}
        self.headers: Mapping[str, str] = {"User-Agent": f"modelrunner/{__version__}", **authorization}
        self.client = new_client(self._endpoint, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def list(self, text: str, *, trust: bool) -> Listing:
        repository, wanted, revision = _parse(text)
        place = f"hf.co/{repository}"
        if self._offline:
            raise SourceFailed(f"{place} cannot be looked up: HF_HUB_OFFLINE is set")
        at = f"/revision/{quote(revision, safe='')}" if revision else ""
        url = f"{self._endpoint}/api/models/{repository}{at}?blobs=true"
        answer = await ask(self.client, url, self.headers, limit=_LONGEST_LISTING, seconds=self._limit)
        _require_found(answer, f"{place}@{revision}" if revision else place)
        try:
            found = msgspec.json.decode(answer.body, type=_Repository)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise SourceFailed(f"{place}: the hub's answer is no list of files; look at HF_ENDPOINT") from None
        siblings = {sibling.name: sibling for sibling in found.siblings}
        chosen = _select(list(siblings), wanted, place, trust)
        if not _COMMIT.fullmatch(found.sha):
            raise SourceFailed(f"{place}: the hub names no commit; look at HF_ENDPOINT")
        files = {name: await self._file(repository, found.sha, siblings[path]) for name, path in chosen.items()}
        return Listing(files, found.sha)

    async def search(self, query: str, format: ModelFormat, limit: int) -> Sequence[FoundModel]:
        """The models that match `query`, the most downloaded first."""
        if self._offline:
            raise SourceFailed("the hub cannot be searched: HF_HUB_OFFLINE is set")
        asked = {"search": query, "filter": str(format), "sort": "downloads", "direction": "-1", "limit": str(limit)}
        url = f"{self._endpoint}/api/models?{urlencode(asked)}"
        answer = await ask(self.client, url, self.headers, limit=_LONGEST_LISTING, seconds=self._limit)
        _require_found(answer, "the search")
        try:
            found = msgspec.json.decode(answer.body, type=list[_SearchResult])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise SourceFailed("the hub's answer is no list of models; look at HF_ENDPOINT") from None
        return [
            FoundModel(f"hf.co/{each.id}", each.downloads, each.likes, each.task or "", bool(each.gated))
            for each in found[:limit]
            if _REPOSITORY.fullmatch(each.id)
        ]

    async def _file(self, repository: str, commit: str, sibling: _Sibling) -> RemoteFile:
        url = f"{self._endpoint}/{repository}/resolve/{quote(commit, safe='')}/{quote(sibling.name)}"
        if sibling.lfs is not None:
            size, digest = sibling.lfs.size, sibling.lfs.sha256
        elif sibling.size is not None and sibling.blob is not None:
            size, digest = sibling.size, sibling.blob
        else:  # a hub that knows nothing of `blobs=true`
            place = f"hf.co/{repository}"
            answer = await ask(
                self.client, url, self.headers, limit=0, method="HEAD", redirects=False, seconds=self._limit
            )
            if answer.status not in (301, 302, 303, 307, 308):
                _require_found(answer, place)
            length = answer.headers.get("x-linked-size") or answer.headers.get("content-length") or ""
            size = int(length) if re.fullmatch("[0-9]{1,17}", length) else -1
            digest = (answer.headers.get("x-linked-etag") or answer.headers.get("etag") or "").strip('"')
        if size < 0 or not _DIGEST.fullmatch(digest):
            raise SourceFailed(
                f"hf.co/{repository}: the hub gives no size and digest for {sibling.name}, so it cannot be verified"
            )
        return RemoteFile(sibling.name, url, size, digest)

    async def header(self, file: RemoteFile, path: Path) -> ModelHeader | None:
        """The header of a GGUF file, from its first bytes; None if it is no GGUF or the hub does not send it."""
        if not file.name.lower().endswith(".gguf"):
            return None
        beginning = b""
        for end in _HEADERS:
            wanted = {**self.headers, "Range": f"bytes={len(beginning)}-{min(end, file.size) - 1}"}
            try:
                answer = await ask(self.client, file.url, wanted, limit=end, seconds=self._limit)
            except SourceFailed:
                return None
            if answer.status != 206:
                return None
            beginning += answer.body
            with contextlib.suppress(InvalidModel):
                return await in_thread(lambda _, seen=beginning: _header_in(seen, file.size, path))  # type: ignore[misc]
            if len(beginning) >= file.size:
                break
        return None


def _header_in(beginning: bytes, size: int, path: Path) -> ModelHeader:
    """Lays the beginning out as a file of the full size, since the reader checks that offsets lie within it. The bytes
    behind it are such that a header which goes on there is invalid."""
    with open(path, "wb") as file:
        file.write(beginning)
        if size > len(beginning):
            file.write(_FILLING[: size - len(beginning)])
        file.truncate(max(size, len(beginning)))
    return read_header(path)


def _parse(text: str) -> tuple[str, str | None, str]:
    """The repository, in the case it was written in, the quantization, and the revision."""
    reference, match = Reference.parse(text), _TEXT.fullmatch(text)
    if match is None or reference.digest is not None:
        raise InvalidReference(f"{text!r} is no model on Hugging Face: write hf.co/ORG/REPO[:QUANT]", param="model")
    return match["repository"], None if reference.tag.lower() == DEFAULT_TAG else reference.tag, reference.revision


def _select(names: list[str], wanted: str | None, place: str, trust: bool) -> dict[str, str]:
    """Names in the bundle to names in the repository."""
    has_gguf = any(name.lower().endswith(".gguf") for name in names)
    folder = folder_files(names, trust=trust) if wanted is None and not has_gguf else []
    return {name: name for name in folder} or choose(names, wanted, place)


def _require_found(answer: HubAnswer, place: str) -> None:
    """Raises what a status other than 200 means."""
    code = answer.headers.get("x-error-code")
    match answer.status:
        case 200:
            return
        case 404:
            raise ModelNotFound(f"{place} is not on the hub, or it is private: look at its name, or set HF_TOKEN")
        case 401 | 403 if code == "GatedRepo":
            raise refused(place, answer.headers)
        case 401 if code in (None, "RepoNotFound"):  # what the hub says of a repository that does not exist, too
            raise ModelNotFound(f"{place} is not on the hub, or it is private: look at its name, or set HF_TOKEN")
        case 401 | 403:
            raise refused(place, answer.headers)
        case 429 | 503 as status:
            wait = retry_after(answer.headers.get("retry-after"))
            raise SourceFailed(f"{place}: the hub answered {status}; pull again later", retry_after=wait)
        case status:
            raise SourceFailed(f"{place}: the hub answered {status}")
