"""Takes keys and files out of bodies that are recorded."""

import re
from typing import Any

import msgspec

_FILE = re.compile(r"(data:(?:[\w.+-]|\\?/)*(?:;[\w=.+-]+)*,)((?:[^\"'\\\s<>)]|\\/)+)", re.ASCII)
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/_-]|\\/){512,}={0,2}")
# Keys by the form that their makers gave them: ours, and those of model services, hubs and clouds.
_KEY = re.compile(
    r"mr-[\w-]{43}|\bmr-[\w-]{16,}|\bsk-[\w-]{16,}|\b(?:hf|gh[opsur]|glpat|npm)[_-]\w{16,}|\bgithub_pat_\w{16,}|\bxox[a-z]-[\w-]{10,}"
    r"|\bA(?:KIA|SIA)[0-9A-Z]{16}|\bAIza[\w-]{30,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
    re.DOTALL,
)
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_SECRET_NAME = re.compile(
    r"(?:.*[-_])?(?:api[-_]?key|authorization|(?:access|bearer|refresh|auth)[-_]?token|secret|password|passwd)",
    re.IGNORECASE,
)
_SECRET_MEMBER = re.compile(
    r'("(?:[^"\\]*[-_])?(?:api[-_]?key|authorization|(?:access|bearer|refresh|auth)[-_]?token'
    r'|secret|password|passwd)"\s*:\s*")((?:[^"\\]|\\.)+)',
    re.IGNORECASE,
)
_GONE = "[redacted]"


def redacted(text: str) -> tuple[str, int]:
    """Returns the text without API keys, passwords by their JSON names, the contents of `data:` URLs, and base64 of
    512 characters and more; and how many were taken out. A JSON text stays one."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return _in_text(text)
    try:
        changed, count = _in_value(value)
    except RecursionError:
        return _in_text(text)
    return (msgspec.json.encode(changed).decode(), count) if count else (text, 0)


def _in_value(value: Any) -> tuple[Any, int]:
    match value:
        case str():
            return _in_string(value)
        case list():
            found = [_in_value(one) for one in value]
            return [one for one, _ in found], sum(count for _, count in found)
        case dict():
            made, total = {}, 0
            for name, one in value.items():
                is_secret = isinstance(one, str) and bool(one) and _SECRET_NAME.fullmatch(name) is not None
                inner, count = (_GONE, 1) if is_secret else _in_value(one)
                made[name], total = inner, total + count
            return made, total
        case _:
            return value, 0


def _in_text(text: str) -> tuple[str, int]:
    text, count = _SECRET_MEMBER.subn(lambda found: found[1] + _GONE, text)
    text, more = _in_string(text)
    return text, count + more


def _in_string(text: str) -> tuple[str, int]:
    text, files = _FILE.subn(lambda found: f"{found[1]}[redacted {len(found[2])} characters]", text)
    text, blobs = _BASE64.subn(lambda found: f"[redacted {len(found[0])} characters]", text)
    text, bearers = _BEARER.subn(lambda found: found[1] + _GONE, text)
    text, keys = _KEY.subn(_GONE, text)
    return text, files + blobs + bearers + keys
