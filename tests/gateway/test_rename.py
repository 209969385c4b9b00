"""A name that the engine was not started with reaches it as one that it was."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from modelrunner.engine.runner import Runner
from modelrunner.engineapi import EngineApi
from modelrunner.gateway.calls import Fields, Inference, InferenceHead
from modelrunner.gateway.routes import OPENAI, match

KNOWN = ("docker.io/ai/smollm2:latest", "sha256:" + "a" * 64)


def runner(names: tuple[str, ...] | None) -> Runner:
    return cast("Runner", SimpleNamespace(names=names, api=EngineApi()))


def body_for(runner: Runner, model: str, body: bytes) -> bytes:
    """What the engine gets."""
    route = match("/v1/completions")
    assert route is not None
    head = InferenceHead(route, None, None, "", False, False, False)
    return OPENAI.request(Inference(head, Fields(model), None, body, "1", 0.0), runner)[0].encoded()


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"smol","prompt":"x"}',
        b'{ "prompt" : "the \\"model\\": \\"smol\\"", "stream":true,"model" :"smol"}',
        b'{"tools":[{"model":"smol"}],"model":"smol","seed":18446744073709551615,"temperature":1e-7}',
    ],
)
def test_only_the_name_is_replaced(body: bytes) -> None:
    sent = body_for(runner(KNOWN), "smol", body)
    expected: dict[str, Any] = json.loads(body) | {"model": KNOWN[0]}
    assert json.loads(sent) == expected
    for kept in (b"18446744073709551615", b"1e-7"):
        assert (kept in sent) == (kept in body)  # numbers as they were written


def test_the_name_in_a_large_body_is_replaced() -> None:
    text = 'a "word" \\ ' * (1 << 17)
    body = {"model": "smol", "prompt": text, "seed": 1.0, 'a "b"': 2}
    assert json.loads(body_for(runner(KNOWN), "smol", json.dumps(body).encode())) == body | {"model": KNOWN[0]}


@pytest.mark.parametrize("names", [None, KNOWN, ("smol",)])
def test_a_body_that_needs_nothing_is_not_touched(names: tuple[str, ...] | None) -> None:
    model = "smol" if names != KNOWN else KNOWN[1]
    body = json.dumps({"model": model}).encode()
    assert body_for(runner(names), model, body) is body
