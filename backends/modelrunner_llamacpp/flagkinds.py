"""The kinds of value that only llama.cpp's flags take. Their method `value` returns the value of an attribute of
`xllamacpp.CommonParams`."""

import re
from dataclasses import dataclass

from modelrunner.sdk.flags import Integer, Number, Switch, Text


class Reciprocal(Number):
    """A number. The attribute takes its reciprocal."""

    def value(self, text: str) -> float:
        return 1.0 / float(text)


@dataclass(frozen=True)
class Numbers:
    """A list of at most 128 shares (llama.cpp's most devices), separated by commas."""

    def check(self, text: str) -> None:
        try:
            shares = self.value(text)
        except ValueError:
            shares = []
        if not 1 <= len(shares) <= 128 or not all(0 <= share <= 1e6 for share in shares):
            raise ValueError("numbers from 0 to 1000000 with commas between them, such as 3,1")

    def value(self, text: str) -> list[float]:
        return [float(share) for share in text.split(",")]


@dataclass(frozen=True)
class Words(Text):
    """Some of the `known` words, in any order, separated by semicolons."""

    known: frozenset[str]

    def check(self, text: str) -> None:
        if not set(text.split(";")) <= self.known:
            raise ValueError(f"some of {', '.join(sorted(self.known))}, with semicolons between them")


_EXPERTS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"  # LLM_FFN_EXPS_REGEX of common/common.h
_BUFFERS = re.compile(r"[^\s=,]{1,128}=(?:CPU|(?:CUDA|ROCm|Vulkan|SYCL|MTL|Metal)\d{0,3}(?:_Host|_Split)?)")


class Overrides(Text):
    """The placement of tensors: patterns of their names, each with a buffer, separated by commas. Only the engine
    interprets the patterns."""

    def check(self, text: str) -> None:
        pieces = text.split(",")
        if len(pieces) > 64 or not all(map(_BUFFERS.fullmatch, pieces)):
            raise ValueError("PATTERN=BUFFER with commas between them, such as blk.1.*exps=CPU or exps=CUDA1")


class AllExperts(Switch):
    """Keeps the experts of all layers in main memory."""

    def value(self, text: str) -> str:
        return rf"\.{_EXPERTS}=CPU"


class Experts(Integer):
    """Keeps the experts of the first layers in main memory."""

    def value(self, text: str) -> str:
        return ",".join(rf"blk\.{layer}\.{_EXPERTS}=CPU" for layer in range(int(text)))


class ScaledPaths(Text):
    """A list of PATH:SCALE, separated by commas. The paths have neither commas nor colons."""

    def value(self, text: str) -> list[tuple[str, float]]:
        pairs = [item.split(":") for item in text.split(",")]
        return [(path, float(scale)) for path, scale in pairs]
