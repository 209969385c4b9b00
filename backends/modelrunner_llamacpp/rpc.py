"""Devices that a `ggml-rpc-server` gives over TCP, on this machine or another (llama.cpp: tools/rpc). Such a server
serves one engine at a time, and lets others wait without a word."""

import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from math import inf

from modelrunner.sdk import BackendExited, EngineDevice, Variant

_PREFIX = "RPC"
_PATIENCE = 1.0  # seconds for a connection
_AGAIN = 30.0  # seconds until a server that was silent is asked again


class Servers:
    """The servers of the settings, by address ("HOST:PORT"), with what each one listed when it was asked last."""

    def __init__(self, addresses: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = dict.fromkeys(addresses, 0.0)
        self._lists: dict[str, tuple[EngineDevice, ...]] = {}
        self._users = Counter[str]()

    def devices(self, ask: Callable[[str], Collection[EngineDevice]]) -> list[EngineDevice]:
        """Returns the devices of all servers, each with its server as `address`, and without memory if that does not
        answer. `ask` has an engine list those of one server, and raises `OSError` if it cannot. A server is asked once,
        and again after an engine that used it failed; while an engine uses it, it could not answer. Blocks."""
        for server, due in self._due.items():
            if self._clock() >= due and not self._users[server]:
                self._look(server, ask)
        devices = [device for server in self._due for device in self._lists.get(server, ())]
        return [replace(device, name=f"{_PREFIX}{number}") for number, device in enumerate(devices)]

    def _look(self, server: str, ask: Callable[[str], Collection[EngineDevice]]) -> None:
        host, _, port = server.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _PATIENCE).close()  # without a server the engine aborts
            self._lists[server] = tuple([replace(device, address=server) for device in ask(server) if is_one(device)])
            self._due[server] = inf
        except OSError:
            known = self._lists.get(server) or (EngineDevice(_PREFIX, server, 0, 0, server),)
            self._lists[server] = tuple([replace(device, total=0, free=0) for device in known])
            self._due[server] = self._clock() + _AGAIN

    @contextmanager
    def used(self, servers: Collection[str]) -> Iterator[None]:
        """While an engine uses these servers they are not asked. They are afterwards, if it ended by itself."""
        self._users.update(servers)
        try:
            yield
        except BackendExited:
            self._due |= dict.fromkeys(servers, 0.0)
            raise
        finally:
            self._users.subtract(servers)


def is_one(device: EngineDevice) -> bool:
    """Returns True for a device of a server."""
    return device.name.startswith(_PREFIX)


def names(used: Collection[EngineDevice], listed: Sequence[EngineDevice]) -> tuple[list[str], dict[str, str]]:
    """Returns the servers of the `used` devices, and for each of the `listed` ones that these servers have the name by
    which an engine knows it that is given these servers alone."""
    servers = [*dict.fromkeys(device.address for device in used if is_one(device))]
    theirs = [device.name for server in servers for device in listed if is_one(device) and device.address == server]
    return servers, {name: f"{_PREFIX}{number}" for number, name in enumerate(theirs)}


def alone(variant: Variant, listed: Sequence[EngineDevice], rooms: Sequence[int]) -> Variant:
    """Returns the variant with most of the room (bytes) on each server that it uses, so that no other fits beside it:
    the server would not answer that one."""
    vram, theirs = variant.memory.vram, {i: device.address for i, device in enumerate(listed) if is_one(device)}
    servers = {theirs[i] for i, size in enumerate(vram) if size and i in theirs}
    if not servers:
        return variant
    most = [
        max(size, 3 * room // 4 if theirs.get(i) in servers else 0)
        for i, (size, room) in enumerate(zip_longest(vram, rooms, fillvalue=0))
    ]
    return replace(variant, memory=replace(variant.memory, vram=tuple(most)))
