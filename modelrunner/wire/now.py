"""The struct of what the daemon does now."""

import msgspec

from modelrunner.wire.daemon import DeviceStatus, RequestStatus
from modelrunner.wire.models import PullStatus
from modelrunner.wire.runners import Memory, RunnerStatus


class Now(msgspec.Struct, frozen=True):
    """The answer of `GET /engines/now`. `status` is that of `/health`; `free` is the unused budget; `waiting` counts
    the requests that wait for a runner, by model, `paused` the IDs of models; `requests` are the oldest of the
    `running` ones under way; `counted` is false where requests that ended are not kept; `pulls` are those of
    `GET /pulls`; `devices` have the order of the figures of `budget`."""

    status: str
    budget: Memory
    free: Memory
    runners: list[RunnerStatus]
    waiting: dict[str, int]
    paused: list[str]
    running: int
    requests: list[RequestStatus]
    counted: bool
    pulls: list[PullStatus] = []
    devices: list[DeviceStatus] = []
