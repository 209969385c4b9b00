"""Checks runtime flags against a typed allow-list, for backends.

A value stays the text of the command line; its kind checks that text. Every other flag is refused. The refusal names
the setting to use instead, or the flag that was probably meant.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from modelrunner.errors import BadRequest


class FlagKind(Protocol):
    """The type of a flag's value. `check` raises `ValueError` with the wanted form. `value` returns the Python value of
    a text that was checked."""

    def check(self, text: str) -> None: ...
    def value(self, text: str) -> Any: ...


@dataclass(frozen=True)
class Integer:
    """A whole number, or a word that stands for one."""

    low: int
    high: int
    words: Mapping[str, int] = field(default_factory=dict)

    def check(self, text: str) -> None:
        digits = text.removeprefix("-")
        known = text in self.words or (digits.isascii() and digits.isdecimal() and len(digits) < 20)
        if not known or not (text in self.words or self.low <= int(text) <= self.high):
            wanted = f"a whole number from {self.low} to {self.high}"
            raise ValueError(" or ".join([wanted, *map(repr, self.words)]))

    def value(self, text: str) -> Any:
        return self.words[text] if text in self.words else int(text)


@dataclass(frozen=True)
class Number:
    """A number from `low` to `high`."""

    low: float
    high: float

    def check(self, text: str) -> None:
        try:
            fits = text.isascii() and "_" not in text and self.low <= float(text) <= self.high
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"a number from {self.low:g} to {self.high:g}")

    def value(self, text: str) -> float:
        return float(text)


@dataclass(frozen=True)
class Choice:
    """One word of a list. `members` maps each to its value."""

    members: Mapping[str, Any]

    def check(self, text: str) -> None:
        if text not in self.members:
            raise ValueError(f"one of {', '.join(self.members)}")

    def value(self, text: str) -> Any:
        return self.members[text]


@dataclass(frozen=True)
class Text:
    """Any text. It is for flags that only the daemon sets."""

    def check(self, text: str) -> None: ...

    def value(self, text: str) -> Any:
        return text


@dataclass(frozen=True)
class Switch:
    """A flag without a value. `off` is the flag for the opposite, "" if the engine has none. The text is "on" or
    "off"."""

    off: str = ""

    def check(self, text: str) -> None: ...

    def value(self, text: str) -> Any:
        return text == "on"


class Flag(Protocol):
    """A flag of an engine: `flag` is its name, `aliases` are other spellings."""

    @property
    def flag(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def kind(self) -> FlagKind: ...


FlagT = TypeVar("FlagT", bound=Flag)


@dataclass(frozen=True)
class Field:
    """A field of a model's configuration that a flag stands for: `context_size`, `parallel` or `gpu_layers`. `words`
    are values of the flag that are no numbers, with the field's value for each."""

    name: str
    words: Mapping[str, int | None] = field(default_factory=dict)

    def value(self, text: str) -> int | None:
        return self.words[text] if text in self.words else int(text)


class AllowList(Generic[FlagT]):
    """The flags of one engine.

    `engine` is its name in messages. `allowed` are the flags that a person may set. `owned` are flags that the
    daemon sets, and `also_owned` are more names of that sort. `reasons` says for a refused flag what to do instead.
    `shorthands` are spellings that stand for a flag with its value. `fields` are the flags that a field of a model's
    configuration stands for.
    """

    def __init__(
        self,
        engine: str,
        allowed: Sequence[FlagT],
        *,
        owned: Sequence[FlagT] = (),
        also_owned: Iterable[str] = (),
        reasons: Mapping[str, str] | None = None,
        shorthands: Mapping[str, tuple[str, str]] | None = None,
        fields: Mapping[str, Field] | None = None,
    ) -> None:
        self._engine = engine
        self._options = {option.flag: option for option in allowed}
        self._spellings = _spellings(allowed)
        self._owned = {*also_owned, *_spellings(owned)}
        self._reasons = reasons or {}
        self._shorthands = shorthands or {}
        self._fields = fields or {}

    def parse(self, flags: Iterable[str]) -> dict[str, str]:
        """Returns runtime flags as a mapping from the engine's flag to the text of its value; the last of several wins.
        Raises `BadRequest` that names the first flag that is unknown, not allowed, or has no value or a wrong one."""
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

    def fold(self, flags: tuple[str, ...]) -> tuple[dict[str, int | None], tuple[str, ...]]:
        """Does as `Backend.fold_flags` should: returns the values of the fields that flags stand for, and the other
        flags, spelled out. Without such a flag it returns the flags unchanged. Raises `BadRequest` as `parse` does."""
        parsed = self.parse(flags)
        fields = {known.name: known.value(parsed.pop(flag)) for flag, known in self._fields.items() if flag in parsed}
        if not fields:
            return {}, flags
        return fields, tuple(word for flag, text in parsed.items() for word in words_of(self._options[flag], text))

    def _lookup(self, word: str) -> tuple[FlagT, str]:
        if word in self._spellings:
            return self._spellings[word]
        name, equals, _ = word.partition("=")
        if name in self._reasons:
            raise _bad(f"{name} cannot be given as a runtime flag: {self._reasons[name]}")
        if name in self._owned:
            raise _bad(f"{name} is set by modelrunner and cannot be given as a runtime flag")
        if not word.startswith("-"):
            raise _bad(f"{word!r} is not a flag: every value follows the flag that it belongs to")
        if equals and name in self._spellings:
            raise _bad(f"{name}: write the value as a word of its own, without '='")
        raise _bad(f"{name!r} is not a runtime flag of {self._engine} that is allowed here{self._meant(name)}")

    def _meant(self, name: str) -> str:
        """Returns the end of the sentence about an unknown flag."""
        known = [*self._spellings, *self._shorthands]
        near = [flag for flag in known if len(name) > 3 and flag.startswith(name)]
        near = near or difflib.get_close_matches(name, known, 3, 0.75)
        return f": did you mean {' or '.join(near[:3])}?" if near else "; docs/configuration.md says what can be set"


def _spellings(options: Iterable[FlagT]) -> dict[str, tuple[FlagT, str]]:
    """Maps each flag and alias to its option, with "off" for a switch's opposite, "on" for the switch, "" for a flag
    with a value."""
    spellings: dict[str, tuple[FlagT, str]] = {}
    for option in options:
        text = "on" if isinstance(option.kind, Switch) else ""
        spellings |= dict.fromkeys((option.flag, *option.aliases), (option, text))
        if isinstance(option.kind, Switch) and option.kind.off:
            spellings[option.kind.off] = (option, "off")
    return spellings


def words_of(option: Flag, text: str) -> list[str]:
    """Returns the words of a command line that give `option` the value of `text`."""
    if not isinstance(option.kind, Switch):
        return [option.flag, text]
    return [option.flag] if text == "on" else [option.kind.off] if option.kind.off else []


def _check(option: Flag, word: str, text: str) -> None:
    try:
        option.kind.check(text)
    except ValueError as wanted:
        raise _bad(f"{word} takes {wanted}, not {text!r}" if text else f"{word} needs a value: {wanted}") from None


def _bad(message: str) -> BadRequest:
    return BadRequest(message, param="runtime-flags")
