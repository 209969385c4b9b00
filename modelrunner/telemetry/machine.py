"""Processor, memory and devices of this machine in the last hour, in steps of ten seconds."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

import psutil

from modelrunner import wire
from modelrunner.concurrency.beat import beat
from modelrunner.scheduler.devices import Device
from modelrunner.telemetry.history import STEP

_KEPT = 3600 // STEP


class MachineHistory:
    """`devices` returns those of this machine with their last figures; `wall` is the time of day in Unix seconds."""

    def __init__(self, devices: Callable[[], Sequence[Device]], wall: Callable[[], float] = time.time) -> None:
        self._devices = devices
        self._wall = wall
        self._steps: deque[wire.MachineStep] = deque(maxlen=_KEPT)
        psutil.cpu_percent()  # the next call tells what was since this one

    async def run(self) -> NoReturn:
        """Looks once in each step."""
        while True:
            await beat(STEP)
            self.look()

    def look(self) -> None:
        main, devices = psutil.virtual_memory(), self._devices()
        used = [main.total - main.available, *(device.total - device.free for device in devices)]
        busy = [device.utilization for device in devices]
        self._steps.append(wire.MachineStep(int(self._wall()), psutil.cpu_percent(), used, busy))

    def __call__(self) -> wire.MachineHour:
        """Returns the looks of the last hour, oldest first."""
        devices = self._devices()
        names = [device.name for device in devices]
        totals = [psutil.virtual_memory().total, *(device.total for device in devices)]
        return wire.MachineHour(names, totals, list(self._steps))
