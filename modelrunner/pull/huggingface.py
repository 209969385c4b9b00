"""`hf.co/ORG/REPO[:QUANT][@REVISION]`: models in GGUF, or in safetensors where there is no GGUF, from the Hugging
Face hub or from the hub that HF_ENDPOINT names.

huggingface_hub's downloads are not used: they can neither be stopped nor resumed by the next call.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelrunner.concurrency.threads import in_thread
from modelrunner.pull.fetching import fetch_files
from modelrunner.pull.hub import Hub
from modelrunner.pull.source import (
    Context,
    FetchResult,
    Preview,
    PullSpec,
    Source,
)
from modelrunner.store import gguf_model
from modelrunner.store.names import WEIGHTS
from modelrunner.store.references import Reference
from modelrunner.store.safetensors_model import require_no_code
from modelrunner.types import Bundle, FoundModel, ModelFormat, ModelHeader, WorkProgress
from modelrunner.web.download import Downloader
from modelrunner.web.partial import RemoteFile
from modelrunner.web.session import LOOK_UP_LIMIT

if TYPE_CHECKING:
    import httpx

_CLAIMED = re.compile(r"(?:hf\.co|(?:www\.)?huggingface\.co)/", re.I)


class HuggingFaceSource(Source):
    """`endpoint` None is huggingface_hub's own (HF_ENDPOINT). `pause` waits between attempts; `look_up_limit` is in
    seconds and `patience` is the downloader's."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: "httpx.AsyncBaseTransport | None" = None,
        look_up_limit: float = LOOK_UP_LIMIT,
        patience: float = 60.0,
    ) -> None:
        self._endpoint = endpoint
        self._pause = pause
        self._transport = transport
        self._look_up_limit = look_up_limit
        self._patience = patience

    def claims(self, text: str) -> bool:
        return _CLAIMED.match(text) is not None

    async def revision(self, wanted: PullSpec) -> str | None:
        async with await self._hub(wanted.token) as hub:
            return (await hub.list(wanted.text, trust=wanted.trust)).revision

    async def preview(self, text: str, folder: Path, token: str | None) -> Preview:
        async with await self._hub(token) as hub:
            listing = await hub.list(text, trust=True)  # a model that is only looked at runs nothing
            file = listing.files.get("model.gguf")
            if file is None or len(listing.files) > 1:  # shards and projectors have headers of their own
                return Preview(listing.size)
            header = await hub.header(file, folder / "header.gguf")
            return Preview(listing.size, _bundle(text, file, header, folder) if header else None)

    async def search(self, query: str, format: ModelFormat, limit: int) -> Sequence[FoundModel]:
        async with await self._hub(None) as hub:
            return await hub.search(query, format, limit)

    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        context.report(WorkProgress(f"Looking up {wanted.text}", "resolving"))
        async with await self._hub(wanted.token) as hub:
            listing = await hub.list(wanted.text, trust=wanted.trust)
            stored = {
                name: file.sha256
                for name, file in listing.files.items()
                if file.sha256 is not None and await context.stored(file.sha256)
            }
            wanting = {name: file for name, file in listing.files.items() if name not in stored}
            paths = {name: context.partial(file) for name, file in wanting.items()}

            async def check() -> None:  # the small files are here by now
                small = {name: path for name, path in paths.items() if path.is_file()}
                if not wanted.trust:
                    await in_thread(lambda _: require_no_code(small))

            downloader = Downloader(hub.client, hub.headers, pause=self._pause, patience=self._patience)
            for name in await fetch_files(
                wanting, context, downloader, late=lambda name: name.endswith(WEIGHTS), check=check
            ):
                del paths[name]
                stored[name] = listing.digests[name]
            return FetchResult(paths, listing.digests, stored, listing.revision, version=listing.commit)

    async def _hub(self, token: str | None) -> "Hub":
        return await in_thread(lambda _: Hub(self._endpoint, token, self._transport, self._look_up_limit))


def _bundle(text: str, file: RemoteFile, header: ModelHeader, folder: Path) -> Bundle:
    """The bundle of a model that is one file. Its ID is none of the store's."""
    names = ("model.gguf",)
    return Bundle(
        model_id=f"sha256:{file.digest:0<64}",
        references=(Reference.parse(text).short,),
        format=ModelFormat.GGUF,
        directory=folder,
        files={name: folder / name for name in names},
        header=header,
        size=file.size,
        context_length=gguf_model.context_length(header),
        capabilities=gguf_model.capabilities(header, names),
    )
