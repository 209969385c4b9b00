"""Schemas for an engine whose grammars hold less than JSON schemas say."""

import re
from pathlib import Path
from time import process_time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.gateway.request.schemas import plain_pattern
from tests.gateway.harness import CHAT, Answer, proxy, request

PATTERNS = [
    *(r"^[A-Z]{3}-\d{2}$", r"^hello there indeed\!$", "abc", "a|b", r"(?:a|b)+?c", r"^\w+@[\w.-]+\.\w{2,3}$", ".{2}"),
    *(
        r"[^\d\s]x",
        r"\u0041[\u0042-\u0044]\x2e",
        r"a\-b\{\}",
        "^a$|^b$",
        r"x\$",
        r"\S\D\W",
        "(?P<name>ab)*",
        "a{2}b{1,}",
    ),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_matches_the_plain_pattern_matches_the_pattern(pattern: str) -> None:
    plain = plain_pattern(pattern)
    if plain is None:
        assert pattern == "^a$|^b$"  # anchors in the middle
        return
    assert plain.startswith("^")
    assert plain.endswith("$")
    assert not re.search(r"\\[dwsDWS!-]|\(\?", plain)

    @given(st.from_regex(plain, fullmatch=True))
    def check(text: str) -> None:
        assert re.search(pattern, text, re.ASCII)  # as ECMAScript, but for its spaces

    check()


@pytest.mark.parametrize(
    "pattern", [r"\bx", "(?=a)", "(?!a)b", r"(a)\1", r"\p{L}", "(", ")", "[a", "*a", "a\\", "a*+", "^^"]
)
def test_what_no_grammar_holds_has_no_plain_pattern(pattern: str) -> None:
    assert plain_pattern(pattern) is None


@given(st.text(st.sampled_from(r"^$ab\dwsu0041[](){}*+?|.,!-\"(?:")) | st.text())
def test_any_pattern_has_a_plain_one_or_none(pattern: str) -> None:
    plain = plain_pattern(pattern)
    assert plain is None or plain.startswith("^")


@pytest.mark.parametrize("piece", ["(", "[", "a{1", "\\d", "(?:", "[a", "|", "\\u00"])
def test_the_time_is_linear_in_the_pattern(piece: str) -> None:
    begun = process_time()
    plain_pattern(piece * 10_000)
    assert process_time() - begun < 2


async def ask(folder: Path, **fields: Any) -> tuple[Answer, Any]:
    async with proxy(folder, "fast") as served:
        served.runner.change((CHAT,), unheld=frozenset({"uniqueItems", "not"}))
        answer = await served.ask(request(CHAT, {"model": "m", "messages": []} | fields))
        sent = msgspec.json.decode(served.engine.received[-1].body) if served.engine.received else None
        return answer, sent


def schema(of: dict[str, Any]) -> dict[str, Any]:
    inner = {"type": "object", "properties": {"not": of}, "required": ["not"]}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": inner}}


async def test_a_pattern_is_written_for_the_engine(folder: Path) -> None:
    answer, sent = await ask(folder, response_format=schema({"type": "string", "pattern": r"^\d$"}))
    assert "x-modelrunner-ignored" not in answer.headers  # `not` is a name here
    assert sent["response_format"] == schema({"type": "string", "pattern": "^[0-9]$"})


@pytest.mark.parametrize(
    ("of", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "response_format.uniqueItems"),
        ({"not": {"type": "string"}}, "response_format.not"),
        ({"type": "number", "minimum": 3}, "response_format.minimum"),
        ({"type": "string", "format": "email"}, "response_format.format"),
        ({"type": "integer", "minimum": 3}, ""),
        ({"type": "string", "format": "date"}, ""),
        ({"enum": [{"not": 1}]}, ""),
    ],
)
async def test_what_the_engine_does_not_hold_is_named(folder: Path, of: dict[str, Any], named: str) -> None:
    answer, sent = await ask(folder, response_format=schema(of))
    assert answer.headers.get("x-modelrunner-ignored", "") == named
    assert sent["response_format"] == schema(of)


async def test_a_pattern_that_cannot_be_held_is_refused_but_in_a_tool(folder: Path) -> None:
    wrong = {"type": "string", "pattern": r"\bx"}
    answer, sent = await ask(folder, response_format=schema(wrong))
    assert (answer.status, answer.error["param"], sent) == (400, "response_format", None)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": wrong}}}}
    answer, sent = await ask(folder, tools=[tool])
    assert answer.headers["x-modelrunner-ignored"] == "tools.pattern"
    assert sent["tools"][0]["function"]["parameters"] == {"properties": {"a": {"type": "string"}}}
