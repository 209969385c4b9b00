"""Models are packaged, named, removed and pruned while others run that have the same files: none of theirs vanishes."""

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.api.conftest import Daemon, StartDaemon
from tests.store.samples import write_gguf
from tests.waiting import HUNG

ROUNDS = 8
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
HEADERS = {"Accept": "application/json"}


async def post(daemon: Daemon, path: str, body: Any = None) -> dict[str, Any]:
    async with daemon.unix.post(path, json=body, headers=HEADERS) as answer:
        assert answer.status in (200, 201), await answer.text()
        lines = (await answer.text()).splitlines()
    return dict(json.loads(lines[-1])) if lines else {}


async def chats(daemon: Daemon, name: str, over: asyncio.Event) -> int:
    """Each loads the model anew."""
    count = 0
    while not over.is_set() or not count:
        await post(daemon, "/v1/chat/completions", {**CHAT, "model": name, "keep_alive": 0})
        count += 1
    return count


async def changes(daemon: Daemon, name: str, file: Path) -> None:
    for _ in range(ROUNDS):
        package = {"from": file.as_uri(), "name": name, "system": name}  # another model with the same file
        assert (await post(daemon, "/models/create", package))["type"] == "success"
        await post(daemon, f"/models/{name}/tag?repo={name}-too")
        for removed in (name, f"{name}-too"):
            assert (await post(daemon, f"/models/{name}-too/verify"))["type"] == "success"
            async with daemon.unix.delete(f"/models/{removed}") as answer:
                assert answer.status == 200, await answer.text()
            await post(daemon, "/models/prune")


async def test_no_file_of_a_model_that_runs_or_has_a_name_vanishes(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    over = asyncio.Event()
    files = [write_gguf(tmp_path / f"{seed}.gguf", seed=seed) for seed in range(3)]  # two are those of models
    async with asyncio.timeout(HUNG):
        running = [asyncio.create_task(chats(daemon, name, over)) for name in ("smol", "other")]
        await asyncio.gather(*(changes(daemon, f"new{n}", file) for n, file in enumerate(files)))
        over.set()
        assert min(await asyncio.gather(*running)) > 0
        for name in ("smol", "other"):
            assert (await post(daemon, f"/models/{name}/verify"))["type"] == "success"
    async with daemon.unix.get("/models") as answer:
        assert sorted(model["tags"] for model in await answer.json()) == [["other"], ["smol"]]
