"""Responses that are kept: how many, how long, for whom, and in conversations of which size."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG

YEAR = 365 * 86400.0


async def make(daemon: Daemon, **fields: Any) -> tuple[int, str]:
    """The status of a new response, and its ID, or the sentence of its refusal."""
    async with daemon.unix.post("/v1/responses", json={"model": "smol", "input": "hello", **fields}) as answer:
        body = await answer.json()
        return answer.status, body["id"] if answer.status == 200 else body["error"]["message"]


async def read(daemon: Daemon, id: str, part: str = "") -> int:
    async with daemon.unix.get(f"/v1/responses/{id}{part}") as answer:
        return answer.status


async def end(daemon: Daemon) -> None:
    async with daemon.unix.post("/shutdown"):
        pass
    await daemon.task


async def kept(daemon: Daemon, ids: list[str]) -> list[str]:
    return [id for id in ids if await read(daemon, id) == 200]


async def test_the_newest_are_kept(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, responses_limit=3)
    ids = [(await make(daemon))[1] for _ in range(7)]
    async with asyncio.timeout(HUNG):  # they are written soon after their answers
        while len(await kept(daemon, ids)) > 3:
            pass
    assert await kept(daemon, ids) == ids[-3:]
    assert [await read(daemon, id, "/input_items") for id in ids[-4:]] == [404, 200, 200, 200]
    status, said = await make(daemon, previous_response_id=ids[0])
    assert (status, "there is no response" in said) == (404, True)
    assert (await make(daemon, previous_response_id=ids[-1]))[0] == 200


async def test_one_that_is_not_stored_takes_no_place(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, responses_limit=1)
    _, stored = await make(daemon)
    for _ in range(3):
        status, id = await make(daemon, store=False)
        assert (status, await read(daemon, id)) == (200, 404)
    await end(daemon)
    again = await start_daemon(responses_limit=1)
    assert await read(again, stored) == 200


async def test_a_smaller_limit_holds_from_the_next_response_on(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    ids = [(await make(daemon))[1] for _ in range(4)]
    await end(daemon)
    again = await start_daemon(responses_limit=2)
    assert await kept(again, ids) == ids
    ids.append((await make(again))[1])
    await end(again)
    assert await kept(await start_daemon(), ids) == ids[-2:]


async def test_an_old_one_is_gone(start_daemon: StartDaemon) -> None:
    """It is not shown, no conversation goes on from it, and the next response takes it out of the file. An age that
    is no time at all makes every response of an earlier daemon old."""
    daemon = await start_daemon(models={"smol": 0}, responses_age=YEAR)
    ids = [(await make(daemon))[1] for _ in range(2)]
    assert await kept(daemon, ids) == ids
    await end(daemon)
    later = await start_daemon(responses_age=1e-6)
    assert await kept(later, ids) == []
    for path in ("", "/cancel"):
        async with later.unix.request("POST" if path else "DELETE", f"/v1/responses/{ids[0]}{path}") as answer:
            assert answer.status == 404
    status, said = await make(later, previous_response_id=ids[1])
    assert (status, "too old" in said) == (404, True)
    await end(later)
    patient = await start_daemon(responses_age=YEAR)
    assert await kept(patient, ids) == ids
    await end(patient)
    writing = await start_daemon(responses_age=1e-6)
    assert (await make(writing))[0] == 200
    await end(writing)
    assert await kept(await start_daemon(responses_age=YEAR), ids) == []


async def test_responses_outlive_the_daemon(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, responses_limit=2)
    body = {"model": "smol", "input": "hello"}
    ids = []
    for _ in range(3):
        async with daemon.unix.post("/v1/responses", json=body) as answer:
            ids.append((await answer.json())["id"])
    async with daemon.unix.post("/shutdown"):
        pass
    await daemon.task
    again = await start_daemon()
    for id, status in zip(ids, (404, 200, 200), strict=True):
        async with again.unix.get(f"/v1/responses/{id}") as answer:
            assert answer.status == status
    again.settings.data_dir.joinpath("state", "responses.sqlite").write_bytes(b"no database" * 1000)
    async with again.unix.get(f"/v1/responses/{ids[-1]}") as answer:
        assert answer.status == 404


async def test_a_response_belongs_to_its_key(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    texts = {}
    for name in ("kim", "lee"):
        async with daemon.unix.post("/keys", json={"name": name}) as answer:
            texts[name] = (await answer.json())["text"]
    url = f"http://127.0.0.1:{daemon.port}/v1"
    async with (
        openai.AsyncOpenAI(base_url=url, api_key=texts["kim"], max_retries=0) as kim,
        openai.AsyncOpenAI(base_url=url, api_key=texts["lee"], max_retries=0) as lee,
    ):
        background = await kim.responses.create(model="smol", input="a secret", background=True)
        made = await kim.responses.create(model="smol", input="a secret")
        for id in (background.id, made.id):
            for refused in (
                lee.responses.retrieve(id),
                lee.responses.input_items.list(id),
                lee.responses.delete(id),
                lee.responses.cancel(id),
                lee.responses.create(model="smol", input="what was said?", previous_response_id=id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await refused
            assert (await kim.responses.retrieve(id)).id == id
        assert await kim.responses.create(model="smol", input="and?", previous_response_id=made.id)
    async with daemon.unix.get(f"/v1/responses/{made.id}") as owner:
        assert owner.status == 200


async def test_a_response_in_the_background_counts_once(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    limits = {"concurrency": 1, "requests_per_minute": 2}
    async with daemon.unix.post("/keys", json={"name": "kim"} | limits) as answer:
        text = (await answer.json())["text"]
    url = f"http://127.0.0.1:{daemon.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=text, max_retries=0) as kim:
        for _ in range(2):
            made = await kim.responses.create(model="smol", input="hi", background=True)
            async with asyncio.timeout(HUNG):
                while made.status in ("queued", "in_progress"):
                    await asyncio.sleep(0.02)
                    made = await kim.responses.retrieve(made.id)
            assert made.status == "completed"
        with pytest.raises(openai.RateLimitError, match="2 requests a minute"):
            await kim.responses.create(model="smol", input="hi", background=True)


async def test_a_conversation_is_no_larger_than_a_body(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, body_limit="64KiB")
    statuses, previous = [], None
    for _ in range(6):
        asked = {"model": "smol", "input": "x" * 30_000, "previous_response_id": previous}
        async with daemon.tcp.post("/v1/responses", json=asked) as answer:
            statuses.append(answer.status)
            previous = (await answer.json()).get("id", previous)
    assert statuses[:2] == [200, 200]
    assert statuses[-1] == 413


@pytest.mark.parametrize("background", [False, True])
async def test_conversations_in_memory_count_among_all_bodies(
    start_daemon: StartDaemon, tmp_path: Path, background: bool
) -> None:
    """A small request with a long conversation holds as much as one that sends it."""
    daemon = await start_daemon(models={"smol": 0}, body_limit="64KiB", total_body_limit="200KiB")
    async with daemon.tcp.post("/v1/responses", json={"model": "smol", "input": "x" * 50_000}) as answer:
        previous = (await answer.json())["id"]
    gate = tmp_path / "gate"
    async with daemon.unix.post("/engines/unload", json={"all": True}) as answer:
        assert answer.status == 200, await answer.text()
    daemon.backend.knobs = ("--token-gate", str(gate))
    asked = {"model": "smol", "input": "hi", "previous_response_id": previous, "background": background}

    async def ask() -> int:
        async with daemon.tcp.post("/v1/responses", json=asked) as answer:
            await answer.read()
            return answer.status

    waiting = [asyncio.ensure_future(ask()) for _ in range(6)]
    async with asyncio.timeout(HUNG):
        while 503 not in [one.result() for one in waiting if one.done()]:
            await asyncio.wait([one for one in waiting if not one.done()], return_when="FIRST_COMPLETED")
        gate.touch()
        statuses = await asyncio.gather(*waiting)
        assert set(statuses) == {200, 503}
        while await ask() != 200:  # what was held is free again
            pass
