"""Downloads the files of one model, several at the same time, with one progress."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import TypeVar

from modelrunner.concurrency.tasks import all_stopped
from modelrunner.concurrency.threads import in_thread
from modelrunner.progress import FileProgress, WorkProgress
from modelrunner.pull.source import Context
from modelrunner.store import Digest
from modelrunner.store.files import require_space
from modelrunner.web.download import Downloader
from modelrunner.web.partial import RemoteFile, received

K = TypeVar("K")
_AT_ONCE = 4


async def fetch_files(
    files: Mapping[K, RemoteFile],
    context: Context,
    downloader: Downloader,
    *,
    late: Callable[[K], bool],
    check: Callable[[], Awaitable[None]],
) -> set[K]:
    """Downloads `files` to the paths that `Context.partial` returns, and returns those that the store has received
    meanwhile. `check` is called before the first of the `late` files, and may raise. Raises the errors of
    `Downloader.fetch`, and `InsufficientDisk`."""
    total, done = sum(file.size for file in files.values()), dict.fromkeys(files, 0)
    places = {context.partial(file): file for file in files.values()}

    def require_room() -> None:
        here = sum(received(path, file.size) for path, file in places.items())
        require_space(context.folder, max(0, total - here))

    await context.require_quota({_identity(file): file.size for file in files.values()})
    await in_thread(lambda _: require_room())
    gate, stored = asyncio.Semaphore(_AT_ONCE), set[K]()

    async def fetch(key: K, file: RemoteFile) -> None:
        def advanced(current: int) -> None:
            done[key] = current
            part = FileProgress(f"sha256:{file.sha256}" if file.sha256 else file.name, file.size, current)
            line = WorkProgress(f"Downloading {file.name}", "downloading", total, sum(done.values()), part)
            context.report(line)

        async with gate:
            if await context.fetch(file, downloader, advanced) is None:
                stored.add(key)
            done[key] = file.size

    async def fetch_all(keys: list[K]) -> None:
        tasks = [asyncio.create_task(fetch(key, files[key])) for key in keys]
        try:
            await asyncio.gather(*tasks)
        finally:
            await all_stopped(*tasks)

    await fetch_all([key for key in files if not late(key)])
    if last := [key for key in files if late(key)]:
        await check()
        await fetch_all(last)
    return stored


def _identity(file: RemoteFile) -> Hashable:
    """Returns a key that is equal for files of the same content, as far as the digests are known."""
    return (Digest.named(file.sha256) if file.sha256 else None) or file.partial_name
