"""The later turns of a conversation are known by its beginning, in every family."""

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import proxy, request

HI, ANSWER, MORE = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"), ("user", "?"))
)
SYSTEM = {"role": "system", "content": "be kind"}


async def prefixes(folder: Path, *asked: tuple[str, dict[str, Any]], most: int = 2) -> list[int | None]:
    async with proxy(folder, "fast") as served:
        served.pipeline.leases.resolve.most = most  # type: ignore[attr-defined]
        for path, body in asked:
            await served.ask(request(path, {"model": "m", **body}))
        return list(served.scheduler.prefixes)


@pytest.mark.parametrize(
    ("path", "first", "later", "other"),
    [
        (
            "/v1/chat/completions",
            {"messages": [SYSTEM, HI]},
            {"messages": [SYSTEM, HI, ANSWER, MORE], "temperature": 1},
            {"messages": [SYSTEM, MORE]},
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "system": "be kind", "messages": [HI]},
            {"max_tokens": 7, "system": "be kind", "messages": [HI, ANSWER, MORE]},
            {"max_tokens": 9, "system": "be cruel", "messages": [HI]},
        ),
        ("/api/chat", {"messages": [HI]}, {"messages": [HI, ANSWER, MORE]}, {"messages": [MORE]}),
        (
            "/v1/responses",
            {"input": [HI], "store": False},
            {"input": [HI, ANSWER, MORE], "store": False},
            {"input": "other", "store": False},
        ),
        ("/v1/completions", {"prompt": "a" * 2000}, {"prompt": "a" * 3000}, {"prompt": "b"}),
        (
            "/v1/chat/completions",
            {"prompt_cache_key": "k", "messages": [HI]},
            {"prompt_cache_key": "k", "messages": [MORE]},
            {"prompt_cache_key": "l", "messages": [HI]},
        ),
    ],
)
async def test_a_conversation_has_one_beginning(
    tmp_path: Path, path: str, first: dict[str, Any], later: dict[str, Any], other: dict[str, Any]
) -> None:
    one, two, three = await prefixes(tmp_path, (path, first), (path, later), (path, other))
    assert one is not None
    assert one == two != three
    assert await prefixes(tmp_path, (path, first), most=1) == [None]


@pytest.mark.parametrize("body", [{"messages": [1, 2]}, {"messages": [{"role": 7}]}, {"messages": 3}, {"input": {}}])
async def test_an_odd_body_has_none_or_is_refused(tmp_path: Path, body: dict[str, Any]) -> None:
    for found in await prefixes(tmp_path, ("/v1/chat/completions", body)):
        assert found is None or isinstance(found, int)
