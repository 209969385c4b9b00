"""Explains why a value does not have the wanted shape, by the sentences of msgspec (of JSON) and pydantic (of TOML).

msgspec 0.19 and later say "Expected `int`, got `str` - at `$.speculative.num_tokens`", "Object contains unknown field
`x` - at `$.a`" and "Object missing required field `model`"."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from modelrunner.errors import BadRequest

_PLACE = re.compile(r"(?P<said>.*?)(?: - at `\$\.?(?P<place>.*)`)?", re.DOTALL)
_NAMED = re.compile(r"Object (?P<what>contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL)


def wrong_field(error: msgspec.ValidationError, known: Iterable[str] = ()) -> BadRequest:
    """Returns the refusal of a value: its `param` is the path of the wrong field, None for the whole value. `known` are
    the names to suggest for an unknown field."""
    whole = _PLACE.fullmatch(str(error))
    said, place = (whole["said"], whole["place"] or "") if whole else (str(error), "")
    if named := _NAMED.fullmatch(said):
        path = f"{place}.{named['name']}".lstrip(".")
        if named["what"] == "missing required":
            return BadRequest(f"the field {path!r} is missing", param=path)
        return BadRequest(f"unknown field {path!r}{nearest(named['name'], known)}", param=path)
    if place and said.endswith("got `null`"):
        return BadRequest(f"the field {place!r} is missing: it is null", param=place.partition("[")[0] or None)
    said = said.replace(" | null`", "`")
    said = said[:1].lower() + said[1:]
    return BadRequest(f"{place}: {said}" if place else said, param=place.partition("[")[0] or None)


_WANTED = {
    "tuple_type": "write a list",
    "list_type": "write a list",
    "string_type": "write a text in quotes",
    "dict_type": "write a table",
    "model_type": "write a table",
    "missing": "it is missing",
    "too_short": "it is empty",
}


def said_of(fault: Mapping[str, Any]) -> str:
    """Returns what pydantic finds wrong with a value of the configuration file; `fault` is one of its `errors()`."""
    return _WANTED.get(fault["type"]) or str(fault["msg"]).removeprefix("Value error, ")


_EXACT = 2.0**53  # below it, each whole number is a double


def whole_number(value: Any) -> Any:
    """Returns the `int` for a whole number that was written as 40.0 or 4e1, and any other value as it is. JSON has one
    kind of number."""
    return int(value) if isinstance(value, float) and abs(value) < _EXACT and value.is_integer() else value


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'X'?" for a name that looks mistyped, else ""."""
    close = get_close_matches(name.lower(), sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
