"""`hf.co/ORG/REPO[:QUANT][@REVISION]`: models on the Hugging Face hub, or on the hub that HF_ENDPOINT names, by its API
(https://huggingface.co/docs/hub/api). One request lists the files with their sizes and digests.

The environment variables are those of the hub's own client
(https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables), and so is the file with the token
of a login.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

import msgspec

from modelrunner import wire
from modelrunner.errors import SourceFailed
from modelrunner.pull.hub import FileSize, Hub, Listing, RepositoryName, chosen_files
from modelrunner.pull.hubsource import HubSource
from modelrunner.pull.selection import quantizations
from modelrunner.types import ModelFormat
from modelrunner.web.partial import RemoteFile
from modelrunner.web.session import ask

_ENDPOINT = "https://huggingface.co"
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,96}/[A-Za-z0-9._-]{1,96}")
_LICENCE = re.compile(r"license:([A-Za-z0-9.+-]{1,64})")


class _LfsFile(msgspec.Struct, frozen=True):
    """A file whose content git stores elsewhere (LFS)."""

    sha256: str
    size: FileSize


class _Sibling(msgspec.Struct, frozen=True, rename={"name": "rfilename", "blob": "blobId"}):
    name: str
    size: FileSize | None = None
    blob: str | None = None
    lfs: _LfsFile | None = None


class _SearchResult(msgspec.Struct, frozen=True, rename={"task": "pipeline_tag"}):
    id: str
    downloads: int = 0
    likes: int = 0
    task: str | None = None
    gated: bool | str = False
    siblings: list[_Sibling] = []


class _Repository(msgspec.Struct, frozen=True):
    sha: str
    siblings: list[_Sibling]
    tags: Any = None

    @property
    def licence(self) -> str:
        tags = self.tags if isinstance(self.tags, list) else []
        matches = (_LICENCE.fullmatch(tag) for tag in tags if isinstance(tag, str))
        return next((match[1] for match in matches if match), "")


class HuggingFaceHub(Hub):
    variable: ClassVar[str] = "HF_TOKEN"

    def usual_endpoint(self) -> str:
        return os.environ.get("HF_ENDPOINT") or _ENDPOINT

    def usual_token(self) -> str | None:
        return None if _is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN") else _token(os.environ)

    async def list(self, text: str, *, trust: bool) -> Listing:
        repository = RepositoryName.parse(text)
        if _offline():
            raise SourceFailed(f"{repository} cannot be looked up: HF_HUB_OFFLINE is set")
        at = f"/revision/{quote(repository.revision, safe='')}" if repository.revision else ""
        answer = await self.get(f"{self.endpoint}/api/models/{repository.path}{at}?blobs=true")
        self.require_found(answer, f"{repository}@{repository.revision}" if at else str(repository))
        try:
            model = msgspec.json.decode(answer.body, type=_Repository)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise SourceFailed(f"{repository}: the hub's answer is not a list of files; check HF_ENDPOINT") from None
        siblings = {sibling.name: sibling for sibling in model.siblings}
        chosen = chosen_files(list(siblings), repository, trust=trust)
        if not _COMMIT.fullmatch(model.sha):
            raise SourceFailed(f"{repository}: the hub names no commit; check HF_ENDPOINT")
        files = {name: await self._file(repository, model.sha, siblings[path]) for name, path in chosen.items()}
        return Listing(files, model.sha, model.licence)

    async def search(self, query: str, format: ModelFormat, limit: int) -> Sequence[wire.Offer]:
        """Returns the models that match `query`, the most downloaded first."""
        if _offline():
            raise SourceFailed("the hub cannot be searched: HF_HUB_OFFLINE is set")
        parameters = {
            "search": query,
            "filter": str(format),
            "sort": "downloads",
            "direction": "-1",
            "limit": str(limit),
            "full": "true",  # with the names of the files
        }
        answer = await self.get(f"{self.endpoint}/api/models?{urlencode(parameters)}")
        self.require_found(answer, "the search")
        try:
            results = msgspec.json.decode(answer.body, type=list[_SearchResult])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise SourceFailed("the hub's answer is not a list of models; check HF_ENDPOINT") from None
        return [
            wire.Offer(
                f"hf.co/{each.id}",
                each.downloads,
                each.likes,
                each.task or "",
                bool(each.gated),
                quantizations(sibling.name for sibling in each.siblings),
            )
            for each in results[:limit]
            if _NAME.fullmatch(each.id)
        ]

    async def _file(self, repository: RepositoryName, commit: str, sibling: _Sibling) -> RemoteFile:
        url = f"{self.endpoint}/{repository.path}/resolve/{quote(commit, safe='')}/{quote(sibling.name)}"
        if sibling.lfs is not None:
            size, digest = sibling.lfs.size, sibling.lfs.sha256
        elif sibling.size is not None and sibling.blob is not None:
            size, digest = sibling.size, sibling.blob
        else:  # a hub that does not support `blobs=true`
            answer = await ask(
                self.client, url, self.headers, limit=0, method="HEAD", redirects=False, seconds=self._limit
            )
            if answer.status not in (301, 302, 303, 307, 308):
                self.require_found(answer, str(repository))
            length = answer.headers.get("x-linked-size") or answer.headers.get("content-length") or ""
            size = int(length) if re.fullmatch("[0-9]{1,17}", length) else -1
            digest = (answer.headers.get("x-linked-etag") or answer.headers.get("etag") or "").strip('"')
        if size < 0 or not _DIGEST.fullmatch(digest):
            raise SourceFailed(
                f"{repository}: the hub gives no size and digest for {sibling.name}, so it cannot be verified"
            )
        return RemoteFile(sibling.name, url, size, digest)


def hub_home(environ: Mapping[str, str]) -> Path:
    """Returns the folder of the hub's own client."""
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{cache}/huggingface").expanduser()


def _token(environ: Mapping[str, str]) -> str | None:
    """Returns the token of the environment, else the one that a login with the hub's client has stored."""
    token = environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN")
    if not token:
        path = environ.get("HF_TOKEN_PATH")
        try:
            token = (Path(path).expanduser() if path else hub_home(environ) / "token").read_text()
        except (OSError, UnicodeDecodeError):
            return None
    return "".join(token.split()) or None


def _offline() -> bool:
    return _is_on("HF_HUB_OFFLINE") or _is_on("TRANSFORMERS_OFFLINE")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")


class HuggingFaceSource(HubSource):
    """Models on the Hugging Face hub. Its endpoint is by default the one of HF_ENDPOINT."""

    hosts = ("hf.co", "huggingface.co", "www.huggingface.co")
    hub = HuggingFaceHub
