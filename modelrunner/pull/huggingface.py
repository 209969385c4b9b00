"""`hf.co/ORG/REPO[:QUANT]`: models in GGUF, or in safetensors where there is no GGUF, from the Hugging Face hub or from
whatever HF_ENDPOINT names.

What is there, its digest and who asks comes through huggingface_hub (so HF_ENDPOINT, HF_TOKEN and HF_HOME hold); the
bytes come through our own downloader. `hf_hub_download` was looked at for that and left: in version 2 every call writes
to a new file of its own, so that nothing can be resumed by the next one, it blocks a thread that cannot be stopped, and
it does not compare what arrived with the file's sha256. huggingface_hub is imported on first use.
"""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelrunner.errors import InvalidReference, ModelNotFound, ModelRunnerError, SourceFailed
from modelrunner.pull.download import Downloader, RemoteFile
from modelrunner.pull.http import new_client
from modelrunner.pull.selection import choose, folder_files
from modelrunner.pull.source import Fetched, Report, Source, require_space
from modelrunner.store.names import WEIGHTS
from modelrunner.store.references import DEFAULT_TAG, Reference
from modelrunner.store.safetensors_model import require_no_code
from modelrunner.types import FileProgress, WorkProgress

if TYPE_CHECKING:
    import httpx

_TEXT = re.compile(r"(?:hf\.co|(?:www\.)?huggingface\.co)/(?P<repository>[^/:@]+/[^/:@]+)[^/]*", re.I)
_CLAIMED = re.compile(r"(?:hf\.co|(?:www\.)?huggingface\.co)/", re.I)
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_TIMEOUT = 15.0


@dataclass(frozen=True, slots=True)
class _Listing:
    """The chosen files by their names inside the bundle, and the headers (the credentials) to fetch them with."""

    files: Mapping[str, RemoteFile]
    headers: Mapping[str, str]
    endpoint: str

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of those that the hub has one of."""
        return {name: file.sha256 for name, file in self.files.items() if file.sha256 is not None}

    @property
    def revision(self) -> str:
        listed = [(name, file.digest) for name, file in self.files.items()]
        return hashlib.sha256(repr(listed).encode()).hexdigest()


class HuggingFaceSource(Source):
    """`endpoint` None is huggingface_hub's own (HF_ENDPOINT). `pause` waits between attempts."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        self._endpoint = endpoint
        self._pause = pause
        self._transport = transport

    def claims(self, text: str) -> bool:
        return _CLAIMED.match(text) is not None

    async def revision(self, text: str, folder: Path, token: str | None, *, trust: bool = False) -> str | None:
        return (await self._list(text, token, trust=trust)).revision

    async def size(self, text: str, folder: Path, token: str | None) -> int:
        listing = await self._list(text, token, trust=True)  # what is only looked at runs nothing
        return sum(file.size for file in listing.files.values())

    async def fetch(
        self, text: str, folder: Path, report: Report, token: str | None, *, trust: bool = False
    ) -> Fetched:
        report(WorkProgress(f"Looking up {text}", phase="resolving"))
        listing = await self._list(text, token, trust=trust)
        paths = {name: folder / file.digest for name, file in listing.files.items()}
        total = sum(file.size for file in listing.files.values())
        here = sum(path.lstat().st_size for path in set(paths.values()) if path.is_file())
        require_space(folder, max(0, total - here))
        client = await asyncio.to_thread(new_client, listing.endpoint, transport=self._transport)
        async with client:
            downloader = Downloader(client, listing.headers, pause=self._pause)
            done = 0
            for name, file in listing.files.items():
                if name.endswith(WEIGHTS) and not trust:  # the small files are here by now
                    await asyncio.to_thread(require_no_code, {n: p for n, p in paths.items() if p.is_file()})
                await downloader.fetch(file, paths[name], _reporter(report, file, done, total))
                done += file.size
        return Fetched(paths, listing.digests, listing.revision)

    async def _list(self, text: str, token: str | None, *, trust: bool) -> _Listing:
        repository, wanted = _parse(text)
        return await asyncio.to_thread(_look_up, self._endpoint, repository, wanted, token, trust)


def _parse(text: str) -> tuple[str, str | None]:
    """The repository, in the case it was written in, and the quantization."""
    reference, match = Reference.parse(text), _TEXT.fullmatch(text)
    if match is None or reference.digest is not None:
        raise InvalidReference(f"{text!r} is no model on Hugging Face: write hf.co/ORG/REPO[:QUANT]", param="model")
    return match["repository"], None if reference.tag.lower() == DEFAULT_TAG else reference.tag


def _reporter(report: Report, file: RemoteFile, done: int, total: int) -> Callable[[int], None]:
    def advanced(current: int) -> None:
        layer = FileProgress(f"sha256:{file.sha256}" if file.sha256 else file.name, file.size, current)
        message = f"Downloading {file.name}"
        report(WorkProgress(message, "downloading", total, done + current, layer))

    return advanced


def _select(names: list[str], wanted: str | None, place: str, trust: bool) -> dict[str, str]:
    """Names in the bundle to names in the repository."""
    has_gguf = any(name.lower().endswith(".gguf") for name in names)
    folder = folder_files(names, trust=trust) if wanted is None and not has_gguf else []
    return {name: name for name in folder} or choose(names, wanted, place)


def _look_up(endpoint: str | None, repository: str, wanted: str | None, token: str | None, trust: bool) -> _Listing:
    """Blocking: one request for the names, one for each chosen file's size and digest."""
    import huggingface_hub
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    with _Translated(repository):
        # Its pool of connections is the process's, and would keep ours open.
        once = {"Connection": "close"}
        hub = huggingface_hub.HfApi(endpoint=endpoint, token=token, library_name="modelrunner", headers=once)
        info = hub.model_info(repository, timeout=_TIMEOUT)
        chosen = _select([s.rfilename for s in info.siblings or ()], wanted, f"hf.co/{repository}", trust)
        files = {}
        for name, path in chosen.items():
            url = huggingface_hub.hf_hub_url(repository, path, revision=info.sha, endpoint=hub.endpoint)
            found = huggingface_hub.get_hf_file_metadata(
                url, token=token, timeout=_TIMEOUT, endpoint=hub.endpoint, headers=once
            )
            if found.size is None or found.etag is None or not _DIGEST.fullmatch(found.etag):
                raise SourceFailed(f"hf.co/{repository}: the hub gives no digest for {path}, so it cannot be verified")
            files[name] = RemoteFile(path, url, found.size, found.etag)
        return _Listing(files, build_hf_headers(token=token, library_name="modelrunner"), hub.endpoint)


class _Translated:
    """Turns huggingface_hub's errors into ours, once, here. Their texts are not passed on: they quote requests."""

    def __init__(self, repository: str) -> None:
        self._place = f"hf.co/{repository}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and (ours := self._translate(error)) is not None:
            raise ours from None

    def _translate(self, error: BaseException) -> ModelRunnerError | None:
        from huggingface_hub import errors

        match error:
            case errors.GatedRepoError():
                reason = "is gated: accept its terms on its page, and set HF_TOKEN or give a token that may read it"
                return SourceFailed(f"{self._place} {reason}")
            case errors.RepositoryNotFoundError() | errors.EntryNotFoundError() | errors.RevisionNotFoundError():
                return ModelNotFound(
                    f"{self._place} is not on the hub, or it is private: look at its name, or set HF_TOKEN"
                )
            case errors.HfHubHTTPError():
                status, wait = error.response.status_code, error.response.headers.get("Retry-After", "")
                hint = "; the token is missing, wrong or expired" if status in (401, 403) else ""
                return SourceFailed(
                    f"{self._place}: the hub answered {status}{hint}",
                    retry_after=float(wait) if wait.isdecimal() else None,
                )
            case errors.HFValidationError():
                return InvalidReference(f"{self._place} is no name that the hub allows", param="model")
            case errors.OfflineModeIsEnabled():
                return SourceFailed(f"{self._place} cannot be looked up: HF_HUB_OFFLINE is set")
            case errors.HTTPError() | OSError() | ValueError():  # type: ignore[attr-defined]
                return SourceFailed(
                    f"{self._place}: the hub cannot be reached ({type(error).__name__}); try again later"
                )
        return None
