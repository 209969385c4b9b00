"""`modelscope.cn/ORG/REPO[:QUANT][@REVISION]`: models on the ModelScope hub, or on the hub that MODELSCOPE_ENDPOINT
names. A token comes from MODELSCOPE_API_TOKEN.

ModelScope publishes no description of these addresses; they are those that its own client uses
(https://github.com/modelscope/modelscope_hub, src/modelscope_hub/_legacy_api.py): one lists the files of a revision
with their sizes and sha256, the other sends one of them.
"""

import os
import re
from typing import ClassVar
from urllib.parse import urlencode

import msgspec

from modelrunner.errors import SourceFailed
from modelrunner.pull.hub import FileSize, Hub, Listing, RepositoryName, chosen_files
from modelrunner.pull.hubsource import HubSource
from modelrunner.web.partial import RemoteFile

_ENDPOINT = "https://www.modelscope.cn"
_MAIN = "master"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class _ScopeFile(msgspec.Struct, frozen=True, rename="pascal"):
    """A file (blob) or a folder (tree) of a listing."""

    path: str
    type: str = "blob"
    size: FileSize = 0
    sha256: str = ""


class _ScopeListing(msgspec.Struct, frozen=True, rename="pascal"):
    files: list[_ScopeFile] = []


class _ListingAnswer(msgspec.Struct, frozen=True, rename="pascal"):
    code: int = 200
    data: _ScopeListing | None = None


class ModelScopeHub(Hub):
    variable: ClassVar[str] = "MODELSCOPE_API_TOKEN"

    def usual_endpoint(self) -> str:
        return os.environ.get("MODELSCOPE_ENDPOINT") or _ENDPOINT

    def usual_token(self) -> str | None:
        return os.environ.get(self.variable)

    async def list(self, text: str, *, trust: bool) -> Listing:
        """Returns the files of the model; its `commit` is the branch or tag, because a listing names no commit."""
        repository = RepositoryName.parse(text)
        revision = repository.revision or _MAIN
        base = f"{self.endpoint}/api/v1/models/{repository.path}/repo"
        answer = await self.get(f"{base}/files?{urlencode({'Revision': revision, 'Recursive': 'True'})}")
        self.require_found(answer, f"{repository}@{revision}")
        try:
            listing = msgspec.json.decode(answer.body, type=_ListingAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise SourceFailed(
                f"{repository}: the hub's answer is not a list of files; check MODELSCOPE_ENDPOINT"
            ) from None
        if listing.code != 200 or listing.data is None:
            raise SourceFailed(f"{repository}: the hub answered with the code {listing.code}")
        entries = {entry.path: entry for entry in listing.data.files if entry.type == "blob"}
        chosen = chosen_files(list(entries), repository, trust=trust)
        files = {}
        for name, path in chosen.items():
            entry = entries[path]
            if not _SHA256.fullmatch(entry.sha256):
                raise SourceFailed(f"{repository}: the hub gives no sha256 for {path}, so it cannot be verified")
            url = f"{base}?{urlencode({'Revision': revision, 'FilePath': path})}"
            files[name] = RemoteFile(path, url, entry.size, entry.sha256)
        return Listing(files, revision)


class ModelScopeSource(HubSource):
    """Models on ModelScope. Its endpoint is by default that of MODELSCOPE_ENDPOINT."""

    hosts = ("modelscope.cn", "www.modelscope.cn")
    hub = ModelScopeHub
