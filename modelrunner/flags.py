"""For backends: runtime flags, as people give them, checked against a typed allow-list.

A value stays the text of the command line; its kind checks that text. What is not listed is refused, and what the
daemon decides itself is refused with that reason.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from modelrunner.errors import BadRequest


class Kind(Protocol):
    """What a flag takes. `check` raises `ValueError` that says what is wanted."""

    def check(self, text: str) -> None: ...


@dataclass(frozen=True)
class Integer:
    """A whole number, or one of some `words` that stand for one."""

    low: int
    high: int
    words: Mapping[str, int] = field(default_factory=dict)

    def check(self, text: str) -> None:
        digits = text.removeprefix("-")
        known = text in self.words or (digits.isascii() and digits.isdecimal() and len(digits) < 20)
        if not known or not (text in self.words or self.low <= int(text) <= self.high):
            wanted = f"a whole number from {self.low} to {self.high}"
            raise ValueError(" or ".join([wanted, *map(repr, self.words)]))


@dataclass(frozen=True)
class Number:
    low: float
    high: float

    def check(self, text: str) -> None:
        try:
            fits = text.isascii() and "_" not in text and self.low <= float(text) <= self.high
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"a number from {self.low:g} to {self.high:g}")


@dataclass(frozen=True)
class Choice:
    """One of some words; what a word means to the engine is the backend's."""

    members: Mapping[str, Any]

    def check(self, text: str) -> None:
        if text not in self.members:
            raise ValueError(f"one of {', '.join(self.members)}")


@dataclass(frozen=True)
class Text:
    """Anything: for flags that only the daemon sets."""

    def check(self, text: str) -> None: ...


@dataclass(frozen=True)
class Switch:
    """No value; `off` is the flag that says the opposite, "" where the engine has none. The text is "on" or "off"."""

    off: str = ""

    def check(self, text: str) -> None: ...


class Option(Protocol):
    """A flag of an engine: `flag` is its name, `aliases` are other spellings."""

    @property
    def flag(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def kind(self) -> Kind: ...


OptionT = TypeVar("OptionT", bound=Option)


class AllowList(Generic[OptionT]):
    """What a person may set for an engine (`allowed`), what the daemon sets (`owned`, and more names of that sort in
    `also_owned`), and `shorthands`: spellings that stand for a flag with its value. `engine` is for messages."""

    def __init__(
        self,
        engine: str,
        allowed: Sequence[OptionT],
        *,
        owned: Sequence[OptionT] = (),
        also_owned: Iterable[str] = (),
        shorthands: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self._engine = engine
        self._spellings = _spellings(allowed)
        self._owned = {*also_owned, *_spellings(owned)}
        self._shorthands = shorthands or {}

    def parse(self, flags: Iterable[str]) -> dict[str, str]:
        """Runtime flags as a mapping from the engine's flag to the text of its value; the last of several wins. Raises
        `BadRequest` that names the first one that is unknown, not allowed, or has no value or a wrong one."""
        parsed: dict[str, str] = {}
        words = iter(flags)
        for word in words:
            if word in self._shorthands:
                flag, text = self._shorthands[word]
                parsed[flag] = text
                continue
            option, text = self._lookup(word)
            if not text:
                text = next(words, "")
                _check(option, word, text)
            parsed[option.flag] = text
        return parsed

    def _lookup(self, word: str) -> tuple[OptionT, str]:
        if word in self._spellings:
            return self._spellings[word]
        name, equals, _ = word.partition("=")
        if name in self._owned:
            raise _bad(f"{name} is set by modelrunner and cannot be given as a runtime flag")
        if not word.startswith("-"):
            raise _bad(f"{word!r} is not a flag: every value follows the flag that it belongs to")
        if equals:
            raise _bad(f"{name}: write the value as a word of its own, without '='")
        raise _bad(f"{word!r} is not a runtime flag of {self._engine} that is allowed here; write it out in full")


def _spellings(options: Iterable[OptionT]) -> dict[str, tuple[OptionT, str]]:
    """Flag or alias -> option, and "off" for a switch's opposite, "on" for the switch, "" where a value follows."""
    found: dict[str, tuple[OptionT, str]] = {}
    for option in options:
        text = "on" if isinstance(option.kind, Switch) else ""
        found |= dict.fromkeys((option.flag, *option.aliases), (option, text))
        if isinstance(option.kind, Switch) and option.kind.off:
            found[option.kind.off] = (option, "off")
    return found


def words_of(option: Option, text: str) -> list[str]:
    """The words of a command line that give `option` that value."""
    if not isinstance(option.kind, Switch):
        return [option.flag, text]
    return [option.flag] if text == "on" else [option.kind.off] if option.kind.off else []


def _check(option: Option, word: str, text: str) -> None:
    try:
        option.kind.check(text)
    except ValueError as wanted:
        raise _bad(f"{word} takes {wanted}, not {text!r}" if text else f"{word} needs a value: {wanted}") from None


def _bad(message: str) -> BadRequest:
    return BadRequest(message, param="runtime-flags")
