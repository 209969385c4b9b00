"""Models in the repositories of a hub: in GGUF, or in safetensors if the repository has no GGUF."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from modelrunner import chattemplates, wire
from modelrunner.concurrency.threads import in_thread
from modelrunner.progress import WorkProgress
from modelrunner.pull.fetching import fetch_files
from modelrunner.pull.hub import Hub
from modelrunner.pull.remoteheader import preview_gguf
from modelrunner.pull.source import Context, FetchResult, Preview, PullSpec, Source
from modelrunner.store import formats
from modelrunner.store.names import TEMPLATE, WEIGHTS
from modelrunner.store.references import Reference
from modelrunner.store.safetensors_model import require_no_code
from modelrunner.types import ModelFormat
from modelrunner.web.download import Downloader
from modelrunner.web.session import LOOK_UP_LIMIT

if TYPE_CHECKING:
    import httpx


class HubSource(Source):
    """A source of models on a hub. `hosts` are the first parts of its models' names; `hub` is made for each pull with
    `endpoint`, the token, `transport` and `look_up_limit` (seconds). `pause` waits between attempts; `patience` is the
    downloader's."""

    hosts: ClassVar[tuple[str, ...]]
    hub: ClassVar[type[Hub]]

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
        return text.lower().startswith(tuple(f"{host}/" for host in self.hosts))

    async def revision(self, wanted: PullSpec) -> str | None:
        async with await self._hub(wanted.token) as hub:
            return (await hub.list(wanted.text, trust=wanted.trust)).revision

    async def preview(self, text: str, folder: Path, token: str | None) -> Preview:
        async with await self._hub(token) as hub:
            listing = await hub.list(text, trust=True)  # nothing of a previewed model is run
            file, bundle = listing.files.get("model.gguf"), None
            if file is not None and len(listing.files) == 1:  # shards and projectors have headers of their own
                name = Reference.parse(text).short
                bundle = await preview_gguf(file, lambda part, limit: hub.ranged(file, part, limit), name, folder)
            template = listing.files.get(TEMPLATE)
            return Preview(
                listing.size,
                bundle,
                files={each.name: each.size for each in listing.files.values()},
                version=listing.commit,
                format=formats.format_of(listing.files),
                template=await hub.text(template, chattemplates.LARGEST) if template else "",
                licences=(listing.licence,) if listing.licence else (),
            )

    async def search(self, query: str, format: ModelFormat, limit: int) -> Sequence[wire.Offer]:
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
                if not wanted.trust:
                    await in_thread(lambda _: require_no_code({n: path for n, path in paths.items() if path.is_file()}))

            downloader = Downloader(hub.client, hub.headers, pause=self._pause, patience=self._patience)
            for name in await fetch_files(
                wanting, context, downloader, late=lambda name: name.endswith(WEIGHTS), check=check
            ):
                del paths[name]
                stored[name] = listing.digests[name]
            return FetchResult(paths, listing.digests, stored, listing.revision, version=listing.commit)

    async def _hub(self, token: str | None) -> Hub:
        make = type(self).hub
        return await in_thread(lambda _: make(self._endpoint, token, self._transport, self._look_up_limit))
