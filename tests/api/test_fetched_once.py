"""What is fetched is fetched once, and what is packaged has the same digest everywhere."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_pulls import create
from tests.pull.hub import Fault, Hub, Repository, sha256
from tests.pull.models import gguf
from tests.waiting import HUNG

SIZE = 4 << 20


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    async with Hub().running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


async def ended(daemon: Daemon) -> None:
    async with daemon.unix.post("/shutdown") as answer:
        assert answer.status == 202
    await daemon.task


async def received(daemon: Daemon) -> int:
    """Bytes of the one pull that is under way."""
    async with daemon.unix.get("/pulls") as answer:
        [pull] = await answer.json()
    current: int = pull["progress"]["current"]
    return current


async def test_a_pull_cancelled_half_way_goes_on_after_a_restart(start_daemon: StartDaemon, hub: Hub) -> None:
    model = gguf(6 * SIZE)
    hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": model})
    hub.faults.append(Fault(hold=asyncio.Event()))
    daemon = await start_daemon(download_rate="1GB")  # over one connection
    pulling = asyncio.create_task(create(daemon, {"from": "hf.co/Org/Tiny-GGUF"}))
    async with asyncio.timeout(HUNG):
        await hub.held.wait()
        while await received(daemon) < 0.45 * len(model):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with daemon.unix.delete("/pulls/hf.co/Org/Tiny-GGUF") as answer:
            assert answer.status == 200
        assert (await pulling)["type"] == "error"
        await ended(daemon)
        daemon = await start_daemon()
        assert (await create(daemon, {"from": "hf.co/Org/Tiny-GGUF"}))["type"] == "success"
    assert len(model) <= hub.sent <= len(model) * 1.05


@pytest.mark.parametrize("together", [True, False])
async def test_what_two_models_share_is_fetched_once(start_daemon: StartDaemon, hub: Hub, together: bool) -> None:
    shared = gguf(SIZE, architecture="clip", kind="mmproj")
    own = [gguf(SIZE // 10, seed=seed) for seed in (1, 2)]
    for name, model in zip(("one", "two"), own, strict=True):
        hub.repositories[f"Org/{name}"] = Repository({f"{name}-Q4_K_M.gguf": model, "mmproj-F16.gguf": shared})
    daemon = await start_daemon()
    orders = [create(daemon, {"from": f"hf.co/Org/{name}"}) for name in ("one", "two")]
    pulled: list[dict[str, Any]] = []
    async with asyncio.timeout(HUNG):
        if together:
            pulled = await asyncio.gather(*orders)
        else:
            pulled = [await order for order in orders]
    assert [last["type"] for last in pulled] == ["success", "success"]
    assert sorted({content.digest for content in hub.contents}) == sorted(map(sha256, (shared, *own)))
    assert hub.sent == len(shared) + sum(map(len, own))


async def test_equal_input_has_equal_digests(start_daemon: StartDaemon, tmp_path: Path) -> None:
    ids = []
    for number in range(2):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(gguf())
        daemon = await start_daemon(folder=tmp_path / f"m{number}")
        body = {"from": file.as_uri(), "name": f"m{number}"}
        assert (await create(daemon, body))["type"] == "success"
        made = {"model": f"own{number}", "from": f"m{number}", "system": "You are Mario.", "license": "MIT"}
        async with daemon.unix.post("/api/create", json={**made, "parameters": {"top_k": 3}}) as answer:
            assert answer.status == 200
            await answer.read()
        async with daemon.unix.get("/models") as answer:
            ids.append([model["id"] for model in await answer.json()])
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2
