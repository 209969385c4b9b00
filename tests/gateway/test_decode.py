"""What a body may be. The rule behind it: proxy and engine read the same model, or the request is refused."""

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.errors import BadRequest
from modelrunner.gateway.routes import OPENAI
from tests.gateway.harness import proxy, request

DEEP = 100_000
REFUSED = {
    "a second model": b'{"model":"a","model":"b"}',
    "the same model twice": b'{"model":"a","model":"a"}',
    "a second model, escaped": b'{"model":"a","mod\\u0065l":"b"}',
    "an escaped model alone": b'{"\\u006dodel":"a"}',
    "an escaped model in capitals": b'{"model":"a","mo\\u0064\\u0065\\u006C":"b"}',
    "a second model after a nested one": b'{"x":{"model":1},"model":"a","y":["model"],"model":"b"}',
    "NaN": b'{"model":"a","temperature":NaN}',
    "Infinity": b'{"model":"a","temperature":-Infinity}',
    "deep arrays": b'{"model":"a","x":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"model":"a","x":' + b'{"x":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "5,000 digits": b'{"model":"a","x":' + b"9" * 5000 + b"}",
    "a lone surrogate": b'{"model":"a","x":"\\ud800 and more"}',
    "a lone low surrogate": b'{"model":"a","x":"\\udc00 and more"}',
    "a lone surrogate in the model": b'{"model":"\\ud83d"}',
    "UTF-16": '{"model":"a"}'.encode("utf-16"),
    "UTF-16 without a mark": '{"model":"a"}'.encode("utf-16-le"),
    "UTF-8 with a mark": b'\xef\xbb\xbf{"model":"a"}',
    "broken UTF-8": b'{"model":"a","x":"\xff"}',
    "UTF-8 cut off": b'{"model":"a","x":"\xe2\x82"}',
    "an overlong form": b'{"model":"a","x":"\xc0\xaf"}',
    "a key in broken UTF-8": b'{"model":"a","x\xff":1}',
    "a control character": b'{"model":"a","x":"\x00"}',
    "an array": b'[{"model":"a"}]',
    "a string": b'"model"',
    "nothing": b"",
    "something after it": b'{"model":"a"}{"model":"b"}',
    "a comment": b'{"model":"a"/**/}',
    "a trailing comma": b'{"model":"a",}',
    "single quotes": b"{'model':'a'}",
    "no model": b'{"Model":"a"}',
    "model null": b'{"model":null}',
    "model a list": b'{"model":["a"]}',
    "stream a text": b'{"model":"a","stream":"true"}',
    "stream a number": b'{"model":"a","stream":1}',
    "keep_alive a list": b'{"model":"a","keep_alive":[1]}',
}
TAKEN = {
    "model in a nested place": b'{"x":{"model":"b","model":"c"},"y":"\\"model\\"","model":"a","z":["model"]}',
    "model as a text": b'{"x":"model","model":"a"}',
    "escaped quotes before it": b'{"x":"\\\\\\"model\\\\","model":"a"}',
    "escapes in other keys": b'{"\\u006dodes":"b","model":"a"}',
    "a pair of surrogates": b'{"model":"a","x":"\\ud83d\\ude00"}',
    "emoji": '{"model":"a","x":"😀"}'.encode(),
    "a long number in a text": b'{"model":"a","x":"' + b"9" * 5000 + b'"}',
    "a long number in a text after an escaped quote": b'{"model":"a","x":"\\"' + b"9" * 400 + b'"}',
    "white space": b' \r\n\t{ "model" : "a" } \n',
    "an escape in the model itself": b'{"model":"\\u0061"}',
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        OPENAI.read(body)


@pytest.mark.parametrize("body", [b"{}", b'{"model":null}'])
def test_a_body_without_a_model_is_told_so(body: bytes) -> None:
    with pytest.raises(BadRequest, match="the field 'model' is missing") as caught:
        OPENAI.read(body)
    assert caught.value.param == "model"


@pytest.mark.parametrize("body", TAKEN.values(), ids=TAKEN.keys())
def test_taken(body: bytes) -> None:
    assert OPENAI.read(body).model == "a"


async def test_the_zoo_over_http(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        for what, body in REFUSED.items():
            answer = await client.ask(request(body=body))
            assert (what, answer.status, answer.error["type"]) == (what, 400, "invalid_request_error")
        assert (await client.ask()).status == 200
        assert len(served.engine.received) == 1


def test_the_fields() -> None:
    fields = OPENAI.read(b'{"stream":true,"keep_alive":90,"model":"a","stream_options":{"x":[1,2,{}]}}')
    assert (fields.model, fields.stream) == ("a", True)
    assert fields.keep_alive == 90


KEYS = st.sampled_from(["model", "models", "x", "", '"', "\\", "mode\\l"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.tuples(KEYS, VALUES), max_size=6), st.booleans(), st.sampled_from([None, 1]))
def test_agrees_with_a_reader_that_sees_every_pair(
    pairs: list[tuple[str, object]], ascii: bool, indent: int | None
) -> None:
    inside = ",".join(f"{json.dumps(k, ensure_ascii=ascii)}:{json.dumps(v, indent=indent)}" for k, v in pairs)
    models = [value for key, value in pairs if key == "model"]
    fine = len(models) == 1 and isinstance(models[0], str)
    try:
        assert OPENAI.read(f"{{{inside}}}".encode()).model == models[0]
        assert fine
    except BadRequest:
        assert not fine


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'"a",', b"1,", '"é",'.encode()])
def test_a_bomb_costs_little_memory(unit: bytes) -> None:
    body = b'{"model":"a","x":[' + unit * ((8 << 20) // len(unit)) + b"1]}"
    is_refused = unit in (b"[],", b"{},")
    tracemalloc.start()
    try:
        assert OPENAI.read(body).model == "a"
        assert not is_refused
    except BadRequest:
        assert is_refused
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2 * len(body)
