"""What a person is told about a JSON value of the wrong shape."""

from typing import Annotated, Any

import msgspec
import pytest

from modelrunner.schema import wrong_field


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    words: list[str] = []


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    inner: Inner | None = None


def _through_json(value: Any, type: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value), type=type)


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        ({}, "name", "the field 'name' is missing"),
        ({"name": 3}, "name", "name: expected `str`, got `int`"),
        ({"name": "a", "innr": 1}, "innr", "unknown field 'innr'; did you mean 'inner'?"),
        ({"name": "a", "inner": {"cuont": 1}}, "inner.cuont", "unknown field 'inner.cuont'; did you mean 'count'?"),
        ({"name": "a", "inner": {"count": 0}}, "inner.count", "inner.count: expected `int` >= 1"),
        ({"name": "a", "inner": {"count": "x"}}, "inner.count", "inner.count: expected `int`, got `str`"),
        ({"name": "a", "inner": {"words": ["x", 1]}}, "inner.words", "inner.words[1]: expected `str`, got `int`"),
        ({"name": "a", "field `x`": 1}, "field `x`", "unknown field 'field `x`'"),
        ([], None, "expected `object`, got `array`"),
    ],
)
@pytest.mark.parametrize("decode", [msgspec.convert, _through_json])
def test_the_field_at_fault_is_named(value: Any, param: str | None, words: str, decode: Any) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        decode(value, type=Outer)
    error = wrong_field(caught.value, ("name", "inner", "count", "words"))
    assert (error.param, error.message) == (param, words)
