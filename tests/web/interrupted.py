"""Run by test_download.py: downloads a file until it is killed."""

import asyncio
import sys
from pathlib import Path

from modelrunner.web.download import Downloader
from modelrunner.web.partial import RemoteFile
from modelrunner.web.session import new_client
from modelrunner.web.transfers import Transfers


async def main(url: str, size: str, digest: str, path: str) -> None:
    async with new_client(url) as client:
        transfers = Transfers(fast=float("inf"), settle=0.0)
        await Downloader(client, {}).fetch(
            RemoteFile("x", url, int(size), digest), Path(path), lambda _: None, transfers
        )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
