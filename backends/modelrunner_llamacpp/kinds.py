"""The kinds of value that a flag of llama.cpp takes.

A value stays the text of the command line; its kind checks that text, and turns it into what an attribute of
`xllamacpp.CommonParams`, or a field of llama-cpp-python's `ModelSettings`, takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Kind(Protocol):
    """What a flag takes. `check` raises `ValueError` that says what is wanted."""

    def check(self, text: str) -> None: ...
    def attribute(self, text: str) -> Any: ...
    def setting(self, text: str) -> Any: ...


@dataclass(frozen=True)
class Integer:
    low: int
    high: int
    words: Mapping[str, int] = field(default_factory=dict)

    def check(self, text: str) -> None:
        digits = text.removeprefix("-")
        known = text in self.words or (digits.isascii() and digits.isdecimal() and len(digits) < 20)
        if not known or not (text in self.words or self.low <= int(text) <= self.high):
            wanted = f"a whole number from {self.low} to {self.high}"
            raise ValueError(" or ".join([wanted, *map(repr, self.words)]))

    def attribute(self, text: str) -> int:
        return self.words[text] if text in self.words else int(text)

    setting = attribute


@dataclass(frozen=True)
class Number:
    low: float
    high: float
    reciprocal: bool = False

    def check(self, text: str) -> None:
        try:
            fits = text.isascii() and "_" not in text and self.low <= float(text) <= self.high
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"a number from {self.low:g} to {self.high:g}")

    def attribute(self, text: str) -> float:
        return 1.0 / float(text) if self.reciprocal else float(text)

    setting = attribute


@dataclass(frozen=True)
class Numbers:
    """A list with commas, of at most 128 shares (llama.cpp's most devices)."""

    def check(self, text: str) -> None:
        try:
            shares = [float(share) for share in text.split(",")]
        except ValueError:
            shares = []
        if not 1 <= len(shares) <= 128 or not all(0 <= share <= 1e6 for share in shares):
            raise ValueError("numbers from 0 to 1000000 with commas between them, such as 3,1")

    def attribute(self, text: str) -> list[float]:
        return [float(share) for share in text.split(",")]

    setting = attribute


@dataclass(frozen=True)
class Words:
    """Some of `known`, in the order given, with semicolons."""

    known: frozenset[str]

    def check(self, text: str) -> None:
        if not set(text.split(";")) <= self.known:
            raise ValueError(f"some of {', '.join(sorted(self.known))}, with semicolons between them")

    def attribute(self, text: str) -> str:
        return text

    setting = attribute


@dataclass(frozen=True)
class Choice:
    """One of some words. `members` gives what the attribute takes (the name of an enum's member as text), `settings`
    what llama-cpp-python takes."""

    members: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def check(self, text: str) -> None:
        if text not in self.members:
            raise ValueError(f"one of {', '.join(self.members)}")

    def attribute(self, text: str) -> Any:
        return self.members[text]

    def setting(self, text: str) -> Any:
        return self.settings.get(text, self.members[text])


@dataclass(frozen=True)
class Text:
    """Anything: for options that only the daemon sets."""

    def check(self, text: str) -> None: ...

    def attribute(self, text: str) -> str:
        return text

    setting = attribute


@dataclass(frozen=True)
class Switch:
    """No value; `off` is the flag that says the opposite, "" where llama.cpp has none. The text is "on" or "off".
    `negated` attributes are true when the switch is off, as `no_kv_offload` is."""

    off: str = ""
    negated: bool = False

    def check(self, text: str) -> None: ...

    def attribute(self, text: str) -> bool:
        return (text == "on") != self.negated

    def setting(self, text: str) -> bool:
        return text == "on"
