"""Removes keys and files from recorded bodies."""

import re
from typing import Any

import msgspec

_FILE = re.compile(r"(data:(?:[\w.+-]|\\?/)*(?:;[\w=.+-]+)*,)((?:[^\"'\\\s<>)]|\\/)+)", re.ASCII)
# It begins where a word does, and not within `\/`: a search from each character of a word that is too short would take
# seconds.
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/_-])(?!(?<=\\)/)(?:[A-Za-z0-9+/_-]|\\/){512,}={0,2}")
# Keys of a known form: ours, and those of model services, hubs and clouds.
_KEY = re.compile(
    r"mr-[\w-]{43}|\bmr-[\w-]{16,}|\bsk-[\w-]{16,}|\b(?:hf|gh[opsur]|glpat|npm)[_-]\w{16,}|\bgithub_pat_\w{16,}|\bxox[a-z]-[\w-]{10,}"
    r"|\bA(?:KIA|SIA)[0-9A-Z]{16}|\bAIza[\w-]{30,}|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
    re.DOTALL,
)
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
# Names of secrets in members of JSON, and in variables and parameters (`NAME=text`).
_NAMES = (
    r"api[-_]?key|authorization|(?:api|access|auth|bearer|refresh|session|id)[-_]?token|secret|password|passwd|pwd"
    r"|passphrase|(?:secret|private|access|secret[-_]?access)[-_]?key"
)
_SECRET_NAME = re.compile(rf"(?:.*[-_])?(?:{_NAMES})", re.IGNORECASE)
_TOKEN_NAME = re.compile(r"(?:.*[-_])?token", re.IGNORECASE)
_LONG_WORD = re.compile(r"[^\s\"\\]{16,}")  # a model's own token is rarely one
_SECRET_MEMBER = re.compile(
    rf'("(?:[^"\\]*[-_])?(?:{_NAMES})"\s*:\s*")((?:[^"\\]|\\.)+)'
    rf'|("(?:[^"\\]*[-_])?token"\s*:\s*"){_LONG_WORD.pattern}',
    re.IGNORECASE,
)
_ASSIGNED = re.compile(rf"((?<![a-z])(?:{_NAMES}|token)=\\{{0,3}}[\"']?)[\w.~+/=%@:!$#*-]{{6,}}", re.IGNORECASE)
_IN_URL = re.compile(r"(:\\?/\\?/[^\s:/@\"'\\]{0,200}:)[^\s@/\"'\\]{1,200}(?=@)")
_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)("?)')
_CUT_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{0,3}$")
_GONE = "[redacted]"


def redacted(text: str) -> tuple[str, int]:
    """Returns the text without API keys, secrets by the names of JSON members and variables, the contents of `data:`
    URLs, and base64 of 512 characters and more; and the number of removed parts. JSON stays valid. JSON in strings of
    JSON, such as the arguments of a call, is searched as well."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            changed, count = _in_value(msgspec.json.decode(text))
            return (msgspec.json.encode(changed).decode(), count) if count else (text, 0)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            pass  # a part of JSON, or another text that begins like JSON
    total = 0
    if r"\"" in text:
        text, total = _in_literals(text)
    text, members = _SECRET_MEMBER.subn(lambda match: (match[1] or match[3]) + _GONE, text)
    text, count = _in_plain(text)
    return text, total + members + count


def _in_value(value: Any) -> tuple[Any, int]:
    match value:
        case str():
            return redacted(value)
        case list():
            pairs = [_in_value(one) for one in value]
            return [one for one, _ in pairs], sum(count for _, count in pairs)
        case dict():
            members, total = {}, 0
            for name, one in value.items():
                is_secret = isinstance(one, str) and bool(one) and _is_secret(name, one, value)
                inner, count = (_GONE, 1) if is_secret else _in_value(one)
                members[name], total = inner, total + count
            return members, total
        case _:
            return value, 0


def _is_secret(name: str, text: str, members: dict[str, Any]) -> bool:
    if _SECRET_NAME.fullmatch(name) is not None:
        return True
    is_token = _TOKEN_NAME.fullmatch(name) is not None and "logprob" not in members
    return is_token and _LONG_WORD.fullmatch(text) is not None


def _in_literals(text: str) -> tuple[str, int]:
    """Searches strings of a JSON text that may themselves be JSON. The last string may be cut off."""
    total = 0

    def searched(match: re.Match[str]) -> str:
        nonlocal total
        changed, count = _in_literal(match[1]) if r"\"" in match[1] else ("", 0)
        total += count
        return f'"{changed}{match[2]}' if count else match[0]

    return _LITERAL.sub(searched, text), total


def _in_literal(raw: str) -> tuple[str, int]:
    try:
        value = msgspec.json.decode(f'"{_CUT_ESCAPE.sub("", raw)}"', type=str)
        changed, count = redacted(value)
        return msgspec.json.encode(changed).decode()[1:-1], count
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return raw, 0


def _in_plain(text: str) -> tuple[str, int]:
    text, files = _FILE.subn(lambda match: f"{match[1]}[redacted {len(match[2])} characters]", text)
    text, blobs = _BASE64.subn(lambda match: f"[redacted {len(match[0])} characters]", text)
    total = files + blobs
    for sign, named in (("", _BEARER), ("=", _ASSIGNED), ("@", _IN_URL)):
        if sign in text:
            text, count = named.subn(lambda match: match[1] + _GONE, text)
            total += count
    text, keys = _KEY.subn(_GONE, text)
    return text, total + keys
