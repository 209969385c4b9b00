"""What an engine holds of each device: what the drivers say, or where one hides processes (a container with process IDs
of its own, an AMD card on an old kernel) by how much less of the device is free than before the engine began."""

import threading
from collections.abc import Callable, Sequence

from modelrunner.processes.processtree import process_tree
from modelrunner.scheduler.devices import Device, held_by, in_old_places


class DeviceMemory:
    """The devices of a machine, for all of its engines. `look` asks the drivers, `places` returns the devices in the
    order of the budget."""

    def __init__(self, look: Callable[[], Sequence[Device]], places: Callable[[], Sequence[Device]]) -> None:
        self._look = look
        self._places = places
        self.lock = threading.Lock()
        self.loading: set[EngineOnDevices] = set()  # those that were not measured since they began
        self.is_told = False  # a driver has said what a process holds: none hides them

    def seen(self) -> Sequence[Device]:
        """Returns the drivers' devices in the order of the budget; none if a driver fails, which the probe logs."""
        try:
            return in_old_places(self._look(), self._places())
        except (OSError, ValueError):
            return ()


class EngineOnDevices:
    """One engine. A difference counts if no other engine of ours began or ended since this one began, and if it is near
    what was planned (half as much more or less): else another program made it. It is taken once, after the load."""

    def __init__(self, machine: DeviceMemory) -> None:
        self._machine = machine
        self._before: dict[str, int] | None = None  # the free bytes of each device, by its ID
        self._taken: tuple[int, ...] = ()

    def begin(self) -> None:
        """Is called in a thread before the engine takes memory of devices."""
        machine = self._machine
        self._changes()
        if machine.is_told:
            return
        with machine.lock:
            is_alone = not machine.loading
            machine.loading.add(self)
        before = {device.id: device.free for device in machine.seen()}
        with machine.lock:
            self._before = before if is_alone and machine.loading == {self} else None

    def end(self) -> None:
        """Is called when the engine has given its memory of devices back."""
        self._changes()
        with self._machine.lock:
            self._machine.loading.discard(self)

    def held(self, pid: int, planned: Sequence[int]) -> tuple[int, ...]:
        """Returns the bytes that the engine `pid` holds of each device; empty if nobody can tell. `planned` are the
        bytes that it was started for. It asks the drivers, in a thread."""
        seen = self._machine.seen()
        held = held_by(seen, [process.pid for process in process_tree(pid)])
        if any(held):
            self._machine.is_told = True
        elif not held and self._before is not None:
            self._taken = _difference(self._before, seen, planned)
        with self._machine.lock:
            self._machine.loading.discard(self)
            self._before = None
        return held or self._taken

    def _changes(self) -> None:
        """Leaves nobody a difference that this engine could have made."""
        self._taken = ()
        with self._machine.lock:
            for each in self._machine.loading:
                each._before = None


def _difference(before: dict[str, int], seen: Sequence[Device], planned: Sequence[int]) -> tuple[int, ...]:
    taken = []
    for device, wanted in zip(seen, (*planned, *[0] * len(seen)), strict=False):
        less = before.get(device.id, 0) - device.free if wanted else 0
        if not wanted / 2 <= less <= wanted * 3 / 2:
            return ()
        taken.append(less)
    return tuple(taken)
