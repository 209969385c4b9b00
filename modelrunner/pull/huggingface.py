"""`hf.co/ORG/REPO[:QUANT][@REVISION]`: models on the Hugging Face hub, or on the hub that HF_ENDPOINT names, by its API
(https://huggingface.co/docs/hub/api). One request lists the files with their sizes and digests.

The settings are huggingface_hub's (HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE). The requests are our own: its
client follows redirects to any address and has no limit for a whole answer, and its downloads can neither be stopped
nor resumed by the next call.
"""

import re
from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

import msgspec

from modelrunner.errors import SourceFailed
from modelrunner.pull.hub import FileSize, Hub, Listing, RepositoryName, chosen_files
from modelrunner.pull.hubsource import HubSource
from modelrunner.pull.reports import FoundModel
from modelrunner.types import ModelFormat
from modelrunner.web.partial import RemoteFile
from modelrunner.web.session import ask

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


class _Repository(msgspec.Struct, frozen=True):
    sha: str
    siblings: list[_Sibling]
    tags: Any = None

    @property
    def licence(self) -> str:
        tags = self.tags if isinstance(self.tags, list) else []
        found = (_LICENCE.fullmatch(tag) for tag in tags if isinstance(tag, str))
        return next((match[1] for match in found if match), "")


class HuggingFaceHub(Hub):
    variable: ClassVar[str] = "HF_TOKEN"

    def usual_endpoint(self) -> str:
        from huggingface_hub import constants

        return constants.ENDPOINT

    def usual_token(self) -> str | None:
        """Returns the token without huggingface_hub's own headers: its client would ask the hub a question to make
        them."""
        from huggingface_hub import constants, get_token

        return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()

    async def list(self, text: str, *, trust: bool) -> Listing:
        repository = RepositoryName.parse(text)
        if _offline():
            raise SourceFailed(f"{repository} cannot be looked up: HF_HUB_OFFLINE is set")
        at = f"/revision/{quote(repository.revision, safe='')}" if repository.revision else ""
        answer = await self.get(f"{self.endpoint}/api/models/{repository.path}{at}?blobs=true")
        self.require_found(answer, f"{repository}@{repository.revision}" if at else str(repository))
        try:
            found = msgspec.json.decode(answer.body, type=_Repository)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise SourceFailed(f"{repository}: the hub's answer is not a list of files; check HF_ENDPOINT") from None
        siblings = {sibling.name: sibling for sibling in found.siblings}
        chosen = chosen_files(list(siblings), repository, trust=trust)
        if not _COMMIT.fullmatch(found.sha):
            raise SourceFailed(f"{repository}: the hub names no commit; check HF_ENDPOINT")
        files = {name: await self._file(repository, found.sha, siblings[path]) for name, path in chosen.items()}
        return Listing(files, found.sha, found.licence)

    async def search(self, query: str, format: ModelFormat, limit: int) -> Sequence[FoundModel]:
        """Returns the models that match `query`, the most downloaded first."""
        if _offline():
            raise SourceFailed("the hub cannot be searched: HF_HUB_OFFLINE is set")
        asked = {"search": query, "filter": str(format), "sort": "downloads", "direction": "-1", "limit": str(limit)}
        answer = await self.get(f"{self.endpoint}/api/models?{urlencode(asked)}")
        self.require_found(answer, "the search")
        try:
            found = msgspec.json.decode(answer.body, type=list[_SearchResult])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise SourceFailed("the hub's answer is not a list of models; check HF_ENDPOINT") from None
        return [
            FoundModel(f"hf.co/{each.id}", each.downloads, each.likes, each.task or "", bool(each.gated))
            for each in found[:limit]
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


def _offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


class HuggingFaceSource(HubSource):
    """Models on the Hugging Face hub. Its endpoint is by default huggingface_hub's own (HF_ENDPOINT)."""

    hosts = ("hf.co", "huggingface.co", "www.huggingface.co")
    hub = HuggingFaceHub
