"""Builds msgspec's type information of every struct before the daemon serves.

msgspec builds this information at the first decoding of a struct, and publishes it before it is complete. Two threads
that decode the same struct for the first time crash the process (seen with msgspec 0.22)."""

from collections.abc import Iterator

import msgspec


def prime() -> None:
    """Prepares all loaded structs, including those of plug-ins. Call it while no other thread decodes."""
    for struct in structs():
        msgspec.json.Decoder(struct)


def structs() -> Iterator[type[msgspec.Struct]]:
    """Yields every loaded subclass of `msgspec.Struct`, in no particular order."""
    waiting = [msgspec.Struct]
    while waiting:
        subclasses = waiting.pop().__subclasses__()
        waiting += subclasses
        yield from subclasses
