"""The pages of OpenAI's lists: uploaded files, and the items of a stored response."""

from itertools import chain
from typing import Any

import aiohttp

from tests.api.conftest import Daemon, StartDaemon


async def pages(daemon: Daemon, path: str, **query: str) -> tuple[list[list[str]], list[str]]:
    """The IDs of each page, walked from `last_id` to `last_id`, and those of the list as a whole. A client walks by the
    last item's own ID, which is the same."""
    async with daemon.unix.get(path, params=query | {"limit": "100"}) as answer:
        whole = [item["id"] for item in (await answer.json())["data"]]
    found: list[list[str]] = []
    more: dict[str, Any] = {"has_more": True}
    after: dict[str, str] = {}
    while more["has_more"]:
        async with daemon.unix.get(path, params=query | after | {"limit": "2"}) as answer:
            more = await answer.json()
        found.append([item["id"] for item in more["data"]])
        assert (more["first_id"], more["last_id"]) == (found[-1][0], found[-1][-1])
        after = {"after": more["last_id"]}
    async with daemon.unix.get(path, params=query | {"after": "nobody"}) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "after")
    async with daemon.unix.get(path, params=query | after) as answer:
        rest = await answer.json()
        assert (rest["data"], rest["first_id"], rest["has_more"]) == ([], None, False)
    return found, whole


async def test_pages_of_files(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    for name in "abcde":
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"x", filename=name)
        async with daemon.unix.post("/v1/files", data=form) as answer:
            assert answer.status == 200
    found, whole = await pages(daemon, "/v1/files")
    assert [len(page) for page in found] == [2, 2, 1]
    assert list(chain(*found)) == whole


async def test_pages_of_a_responses_input(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    said: list[dict[str, Any]] = [{"role": "user", "content": text} for text in "abcd"]
    said.append({"id": "msg_1", "type": "message", "role": "assistant", "content": "e"})  # as an answer before it had
    async with daemon.unix.post("/v1/responses", json={"model": "smol", "input": said}) as answer:
        path = f"/v1/responses/{(await answer.json())['id']}/input_items"
    (newest, _), (oldest, whole) = await pages(daemon, path), await pages(daemon, path, order="asc")
    assert [len(page) for page in oldest] == [2, 2, 1]
    assert list(chain(*oldest)) == whole == list(chain(*newest))[::-1]
