"""JSON schemas in the form that an engine's grammars hold: patterns are written without the syntax that they lack, and
keywords that they ignore are named.

Source of what llama.cpp holds: common/json-schema-to-grammar.cpp there."""

import re
from collections.abc import Collection
from typing import Any

import msgspec

from modelrunner.errors import BadRequest
from modelrunner.gateway.dialects.nesting import decode_with_room
from modelrunner.gateway.engine_request import EngineRequest

_NAMES = frozenset({"properties", "$defs", "definitions", "patternProperties"})  # hold schemas by names of the client
_VALUES = frozenset({"enum", "const", "default", "examples"})
_FORMATS = frozenset({"date", "time", "date-time", "uuid", "uuid1", "uuid2", "uuid3", "uuid4", "uuid5"})
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": " "}  # no line break stands in a text of JSON
_ANY = r'[^"\\\x00-\x1F]'
_SPECIAL = frozenset("|.()[]{}*+?^$")
_TIMES = re.compile(r"\{\d{1,4}(,\d{0,4})?\}")
_GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z]\w{0,31}>)?(?!\?)")
_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4}))")
_PIECE = 64 << 10  # characters of a pattern


def hold_schemas(request: EngineRequest, ignored: Collection[str]) -> tuple[str, ...]:
    """Writes the schemas of a chat or a completion in the form that the engine holds, and returns the names of what it
    does not hold; `ignored` are the keywords that its grammars ignore. Raises `BadRequest` for a pattern of the answer
    that has no such form."""
    named: dict[str, None] = {}
    for field in ("response_format", "json_schema", "tools"):
        raw = request.raw(field)
        if raw is not None:
            value = decode_with_room(msgspec.json.decode, bytes(raw))
            if _rewrite(value, field, ignored, named):
                request.set({field: value})
    return tuple(named)


def _rewrite(value: Any, field: str, ignored: Collection[str], named: dict[str, None]) -> bool:
    """Rewrites all schemas in a field of a request; returns whether one changed."""
    changed = False
    open_values: list[tuple[Any, bool]] = [(value, False)]
    while open_values:
        one, has_names = open_values.pop()
        if isinstance(one, list):
            open_values += [(inner, False) for inner in one]
        if not isinstance(one, dict):
            continue
        if not has_names:
            changed = _plain(one, field, ignored, named) or changed
        for key, inner in one.items():
            if has_names or key not in _VALUES:
                open_values.append((inner, not has_names and key in _NAMES))
    return changed


def _plain(schema: dict[str, Any], field: str, ignored: Collection[str], named: dict[str, None]) -> bool:
    """Rewrites the pattern of a schema, and names the keywords that are not held."""
    dropped = [name for name in schema if name in ignored]
    if schema.get("type") == "number":
        dropped += [name for name in _BOUNDS if name in schema]
    if schema.get("type") == "string" and isinstance(form := schema.get("format"), str) and form not in _FORMATS:
        dropped.append("format")
    named |= dict.fromkeys(f"{field}.{name}" for name in dropped)
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return False
    plain = plain_pattern(pattern)
    if plain is None and field != "tools":
        raise BadRequest(
            f"the engine of this model cannot hold the pattern {pattern[:80]!r}: write it without look-arounds, "
            "references and word boundaries",
            param=field,
        )
    if plain is None:
        del schema["pattern"]
        named[f"{field}.pattern"] = None
    else:
        schema["pattern"] = plain
    return plain != pattern


def plain_pattern(pattern: str) -> str | None:
    """Returns a regular expression whose matches all match `pattern`, in the syntax of llama.cpp's grammars: anchored,
    with classes written out, without kinds of groups and of greed. None if there is none. Takes linear time."""
    if len(pattern) > _PIECE:
        return None
    text = pattern.removeprefix("^")
    if text.endswith("$") and (len(text) - len(text[:-1].rstrip("\\"))) % 2 == 1:
        text = text[:-1]
    parts: list[str] = []
    at = depth = 0
    while at < len(text):
        sign, step = text[at], _step(text, at)
        depth += (sign == "(") - (sign == ")")
        if step is None or depth < 0 or (step[0][0] in "*+?{" and (not parts or parts[-1] in ("(", "|"))):
            return None
        parts.append(step[0])
        at = step[1]
    if depth:
        return None
    return f"^({''.join(parts)})$" if "|" in parts else f"^{''.join(parts)}$"


def _step(text: str, at: int) -> tuple[str, int] | None:
    """Returns the plain form of the piece of a pattern that begins at `at`, and its end."""
    sign = text[at]
    if sign == "\\":
        return _escaped(text, at)
    if sign == "[":
        return _class(text, at)
    if sign == "(":
        group = _GROUP.match(text, at)
        return ("(", group.end()) if group else None
    if sign in "*+?" or (sign == "{" and (times := _TIMES.match(text, at))):
        end = at + 1 if sign != "{" else times.end()  # type: ignore[union-attr]  # it matched
        if text[end : end + 1] == "+":
            return None
        return text[at:end], end + (text[end : end + 1] == "?")
    if sign in '^$"':
        return None
    if sign == ".":
        return _ANY, at + 1
    return (f"\\{sign}" if sign in "{}]" else sign), at + 1


def _escaped(text: str, at: int) -> tuple[str, int] | None:
    letter = text[at + 1 : at + 2]
    if (code := _CODE.match(text, at)) is not None:
        return _literal(chr(int(code[1] or code[2], 16))), code.end()
    if letter in _CLASSES:
        return f"[{_CLASSES[letter]}]", at + 2
    if letter and letter.lower() in _CLASSES:
        return rf'[^{_CLASSES[letter.lower()]}"\\\x00-\x1F]', at + 2
    if not letter or letter.isalnum() or letter in '"\\':
        return None  # a boundary, a reference, a property; or a text that JSON would have to escape
    return _literal(letter), at + 2


def _literal(sign: str) -> str:
    return f"\\{sign}" if sign in _SPECIAL else sign


def _class(text: str, at: int) -> tuple[str, int] | None:
    """Returns a class of characters with its escapes written out."""
    parts, at = ["["], at + 1
    if text[at : at + 1] == "^":
        parts, at = [r'[^"\\\x00-\x1F'], at + 1
    while at < len(text) and text[at] != "]":
        sign, letter = text[at], text[at + 1 : at + 2]
        if sign != "\\":
            if sign in '["':
                return None
            part, at = sign, at + 1
        elif (code := _CODE.match(text, at)) is not None:
            part, at = code[0], code.end()
        elif letter in _CLASSES:
            part, at = _CLASSES[letter], at + 2
        elif not letter or letter.isalnum() or letter in '"\\':
            return None
        else:
            part, at = rf"\x{ord(letter):02X}", at + 2
        parts.append(part)
    return (f"{''.join(parts)}]", at + 1) if at < len(text) else None
