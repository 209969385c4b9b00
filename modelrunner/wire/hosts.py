"""The structs about the machines of a cluster."""

import msgspec

from modelrunner.wire.runners import Memory


class HostStatus(msgspec.Struct, frozen=True):
    """A host of the cluster. `state` is joining, ready, draining, silent, gone, or a sentence; `budget` are the bytes
    that our runners there together may hold, null while it does not answer."""

    name: str
    state: str
    address: str
    budget: Memory | None
    devices: list[str]
    models: int
    runners: int


class Hosts(msgspec.Struct, frozen=True):
    """The answer of `GET /hosts`. `problem` says why the cluster cannot be used, "" if it can."""

    hosts: list[HostStatus]
    problem: str


class DrainRequest(msgspec.Struct, frozen=True):
    """The body of `POST /hosts/NAME/drain`; false uses the host again."""

    drain: bool = True
