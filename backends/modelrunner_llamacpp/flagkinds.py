"""The kinds of value that a flag of llama.cpp takes.

A value stays the text of the command line; its kind checks that text, and turns it into what an attribute of
`xllamacpp.CommonParams`, or a field of llama-cpp-python's `ModelSettings`, takes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from modelrunner.sdk import flags


class Kind(flags.Kind, Protocol):
    """What a flag takes, and what its text means to engines without a command line."""

    def attribute(self, text: str) -> Any: ...
    def setting(self, text: str) -> Any: ...


@dataclass(frozen=True)
class Integer(flags.Integer):
    def attribute(self, text: str) -> int:
        return self.words[text] if text in self.words else int(text)

    setting = attribute


@dataclass(frozen=True)
class Number(flags.Number):
    reciprocal: bool = False

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
    """Some of the `known` words, in any order, separated by semicolons."""

    known: frozenset[str]

    def check(self, text: str) -> None:
        if not set(text.split(";")) <= self.known:
            raise ValueError(f"some of {', '.join(sorted(self.known))}, with semicolons between them")

    def attribute(self, text: str) -> str:
        return text

    setting = attribute


@dataclass(frozen=True)
class Choice(flags.Choice):
    """One word of a list. `members` has what the attribute takes for each (an enum's member by its name), `settings`
    what llama-cpp-python takes."""

    settings: Mapping[str, Any] = field(default_factory=dict)

    def attribute(self, text: str) -> Any:
        return self.members[text]

    def setting(self, text: str) -> Any:
        return self.settings.get(text, self.members[text])


_EXPERTS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"  # LLM_FFN_EXPS_REGEX of common/common.h
_BUFFERS = re.compile(r"[^\s=,]{1,128}=(?:CPU|(?:CUDA|ROCm|Vulkan|SYCL|MTL|Metal)\d{0,3}(?:_Host|_Split)?)")


@dataclass(frozen=True)
class Overrides:
    """Where tensors lie: patterns of their names, each with a buffer, separated by commas. Only the engine interprets
    the patterns."""

    def check(self, text: str) -> None:
        pieces = text.split(",")
        if len(pieces) > 64 or not all(map(_BUFFERS.fullmatch, pieces)):
            raise ValueError("PATTERN=BUFFER with commas between them, such as blk.1.*exps=CPU or exps=CUDA1")

    def attribute(self, text: str) -> str:
        return text

    setting = attribute


@dataclass(frozen=True)
class AllExperts(flags.Switch):
    """Keeps the experts of all layers in main memory."""

    def attribute(self, text: str) -> str:
        return rf"\.{_EXPERTS}=CPU"

    setting = attribute


@dataclass(frozen=True)
class Experts(flags.Integer):
    """Keeps the experts of the first layers in main memory."""

    def attribute(self, text: str) -> str:
        return ",".join(rf"blk\.{layer}\.{_EXPERTS}=CPU" for layer in range(int(text)))

    setting = attribute


@dataclass(frozen=True)
class Paths(flags.Text):
    """Absolute paths, separated by commas."""

    def attribute(self, text: str) -> list[str]:
        return text.split(",")

    setting = attribute


@dataclass(frozen=True)
class Text(flags.Text):
    def attribute(self, text: str) -> str:
        return text

    setting = attribute


@dataclass(frozen=True)
class Switch(flags.Switch):
    """A `negated` attribute is true when the switch is off, as `no_kv_offload` is."""

    negated: bool = False

    def attribute(self, text: str) -> bool:
        return (text == "on") != self.negated

    def setting(self, text: str) -> bool:
        return text == "on"
