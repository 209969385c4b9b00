"""Runtime flags, as people give them, checked against the allow-list."""

from collections.abc import Iterable

from modelrunner import BadRequest
from modelrunner_llamacpp.kinds import Switch
from modelrunner_llamacpp.options import ALLOWED, ALSO_OWNED, OWNED, Option

# Spellings that llama-server had before --load-mode, and that people still type.
_SHORTHANDS = {"--mlock": ("--load-mode", "mmap+mlock"), "--no-mmap": ("--load-mode", "none")}


def _spellings(options: Iterable[Option]) -> dict[str, tuple[Option, str]]:
    """Flag or alias -> option, and "off" for a switch's opposite, "on" for the switch, "" where a value follows."""
    found: dict[str, tuple[Option, str]] = {}
    for option in options:
        text = "on" if isinstance(option.kind, Switch) else ""
        found |= dict.fromkeys((option.flag, *option.aliases), (option, text))
        if isinstance(option.kind, Switch) and option.kind.off:
            found[option.kind.off] = (option, "off")
    return found


_SPELLINGS = _spellings(ALLOWED)
_OWNED_NAMES = {*ALSO_OWNED, *_spellings(OWNED)}


def parse(flags: Iterable[str]) -> dict[str, str]:
    """Runtime flags as a mapping from llama-server's flag to the text of its value; the last of several wins. Raises
    `BadRequest` that names the first one that is unknown, not allowed, or has no value or a wrong one."""
    parsed: dict[str, str] = {}
    words = iter(flags)
    for word in words:
        if word in _SHORTHANDS:
            flag, text = _SHORTHANDS[word]
            parsed[flag] = text
            continue
        option, text = _lookup(word)
        if not text:
            text = next(words, "")
            _check(option, word, text)
        parsed[option.flag] = text
    return parsed


def _lookup(word: str) -> tuple[Option, str]:
    if word in _SPELLINGS:
        return _SPELLINGS[word]
    name, equals, _ = word.partition("=")
    if name in _OWNED_NAMES:
        raise _bad(f"{name} is set by modelrunner and cannot be given as a runtime flag")
    if not word.startswith("-"):
        raise _bad(f"{word!r} is not a flag: every value follows the flag that it belongs to")
    if equals:
        raise _bad(f"{name}: write the value as a word of its own, without '='")
    raise _bad(f"{word!r} is not a runtime flag of llama.cpp that is allowed here; write it out in full")


def _check(option: Option, word: str, text: str) -> None:
    try:
        option.kind.check(text)
    except ValueError as wanted:
        raise _bad(f"{word} takes {wanted}, not {text!r}" if text else f"{word} needs a value: {wanted}") from None


def _bad(message: str) -> BadRequest:
    return BadRequest(message, param="runtime-flags")
