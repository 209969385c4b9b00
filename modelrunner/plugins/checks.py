"""Checks of the values that a backend's methods return. A check returns the value, or raises `ValueError` or
`TypeError` with a message about its fault."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from modelrunner.backend import DeclaredModel
from modelrunner.types import EngineDevice, RequiredMemory, RunSpec, Variant

T = TypeVar("T")
_MOST_BYTES = 1 << 60  # more than any machine has
_LONGEST_NAME = 512
_FOLDED = ("context_size", "parallel", "gpu_layers")


def instance(kind: type[T]) -> Callable[[Any], T]:
    def check(value: Any) -> T:
        if not isinstance(value, kind):
            raise ValueError(f"it must be a {kind.__name__}")
        return value

    return check


def optional(check: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else check(value)


def nothing(value: Any) -> None:
    """Ignores the value: the method is called for its effect."""


def words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueError("it must be a sequence of texts")
    return tuple([instance(str)(word) for word in value])


def several_flags(value: Any) -> tuple[tuple[str, ...], ...]:
    return tuple([words(each) for each in value])


def byte_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_BYTES:
        raise ValueError("it must be a whole number of bytes, 0 or more")
    return value


def count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_BYTES:
        raise ValueError("it must be a whole number, 1 or more")
    return value


def finite(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("it must be a finite number")
    return float(value)


def sleep_level(value: Any) -> int:
    if type(value) is not int or value not in (0, 1, 2):
        raise ValueError("it must be 0, 1 or 2")
    return value


def memory(value: Any) -> RequiredMemory:
    checked = instance(RequiredMemory)(value)
    figures = (checked.ram, checked.shared, *instance(tuple)(checked.vram))
    for figure in figures:
        byte_count(figure)
    if checked.shared > checked.ram:
        raise ValueError("`shared` is a part of `ram`")
    if checked.others:
        raise ValueError(
            "`others` is filled in by the daemon: say what other hosts give by `hosts` and `part` of a variant"
        )
    return checked


def variants(value: Any) -> list[Variant]:
    checked = [instance(Variant)(variant) for variant in value]
    if not checked:
        raise ValueError("it must hold one variant at least")
    for variant in checked:
        instance(RunSpec)(variant.spec)
        memory(variant.memory)
        instance(str)(variant.label)
        byte_count(variant.rank)
        part = memory(variant.part)
        if count(variant.hosts) > 1 and (part == RequiredMemory(0) or len(part.devices) != len(variant.memory.devices)):
            raise ValueError("`part` must say what each other host gives: main memory, and as many devices as `memory`")
    return checked


def devices(value: Any) -> list[EngineDevice]:
    checked = [instance(EngineDevice)(device) for device in value]
    for device in checked:
        words((device.name, device.description, device.address))
        byte_count(device.total)
        byte_count(device.free)
    return checked


def declared_models(value: Any) -> list[DeclaredModel]:
    checked = [instance(DeclaredModel)(model) for model in value]
    for model in checked:
        if not isinstance(model.name, str) or not model.name.isprintable() or not 0 < len(model.name) <= _LONGEST_NAME:
            raise ValueError(f"its name must be a printable text of at most {_LONGEST_NAME} characters")
        words(sorted(model.capabilities))
        byte_count(model.size)
        optional(count)(model.context_length)
    return checked


def folded(value: Any) -> tuple[Mapping[str, int | None], tuple[str, ...]]:
    fields, rest = value
    for name, number in instance(Mapping)(fields).items():
        if name not in _FOLDED:
            raise ValueError(f"{name!r} is not one of {', '.join(_FOLDED)}")
        optional(instance(int))(number)
    return fields, words(rest)
