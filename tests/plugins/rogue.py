"""A plug-in that breaks its contract, in each way that was seen."""

import asyncio
import threading
from typing import Any

from modelrunner.backend import BackendStatus
from modelrunner.types import Bundle, RequiredMemory, RunSpec
from tests.fakes import FakeBackend
from tests.waiting import HUNG

released = threading.Event()


class Rogue(FakeBackend):
    """Breaks its contract in the way of `fault`."""

    name = "a-rogue"  # before all others in every order
    fault = ""

    def priority(self, bundle: Bundle) -> float:
        if self.fault == "priority raises":
            raise RuntimeError("no rank today")
        if self.fault == "priority blocks":
            released.wait(5 * HUNG)
        return -1.0

    def status(self) -> BackendStatus:
        if self.fault == "status raises":
            raise RuntimeError("no status today")
        if self.fault == "status blocks":
            released.wait(5 * HUNG)
        return super().status()

    async def disk_usage(self) -> int:
        if self.fault == "disk usage raises":
            raise RuntimeError("no figure today")
        return await super().disk_usage()

    async def required_memory(self, spec: RunSpec) -> Any:
        match self.fault:
            case "nothing":
                return None
            case "negative":
                return RequiredMemory(-5_000_000_000)
            case "a float":
                return RequiredMemory(1.5e9)  # type: ignore[arg-type]
            case "hangs":
                await asyncio.Event().wait()
            case "blocks":
                released.wait(5 * HUNG)
        return await super().required_memory(spec)


FAULTS = [
    *("priority raises", "priority blocks", "status raises", "status blocks", "disk usage raises"),
    *("nothing", "negative", "a float", "hangs", "blocks"),
]
HARMLESS_FOR_RUNS = {"priority raises", "priority blocks", "disk usage raises"}
"""Those that a request which names the backend does not meet."""
