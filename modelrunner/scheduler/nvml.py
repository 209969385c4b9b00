"""Prints what NVIDIA's driver says of its devices, as JSON. `devices.py` runs this file in a process of its own, since
a broken driver lets no thread go that asks it."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

_HIDDEN = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE: the bytes of a process that the driver does not tell
_UNUSED = 64 << 20  # bytes in use of a card that no program uses; the smallest context of CUDA takes some hundred MiB


def read(nvml: Any) -> list[dict[str, Any]]:
    """Returns the fields of each device of `nvml`, the module pynvml, in the order of their PCI addresses: `uuid`,
    `address`, `name`, `total` and `free` (bytes that programs can have), `held` (bytes by process ID, null if hidden),
    `utilization` (percent, or null) and `temperature` (degrees Celsius, or null). Each instance of a divided card (MIG)
    is a device. A card that fell off the bus is left out, and so is one without a memory of its own. Raises the
    module's `NVMLError`."""
    nvml.nvmlInit()
    cards = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            card = nvml.nvmlDeviceGetHandleByIndex(index)
            address = _text(nvml.nvmlDeviceGetPciInfo(card).busId)
        except nvml.NVMLError:  # the card is lost
            continue
        about = {
            "address": address,
            "temperature": _number(nvml, partial(nvml.nvmlDeviceGetTemperature, card, 0)),
            "utilization": _number(nvml, partial(_busy, nvml, card)),
        }
        cards += [(address, _figures(nvml, device) | about) for device in (list(_instances(nvml, card)) or [card])]
    return [device for _, device in sorted(cards, key=lambda pair: pair[0]) if "total" in device]


def _instances(nvml: Any, card: Any) -> Iterator[Any]:
    """Yields the instances of a divided card."""
    try:
        if nvml.nvmlDeviceGetMigMode(card)[0] != 1:
            return
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(card)
    except nvml.NVMLError:  # not supported: the card cannot be divided
        return
    for index in range(most):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index)
        except nvml.NVMLError:  # no such instance
            continue


def _figures(nvml: Any, device: Any) -> dict[str, Any]:
    try:
        memory = _memory(nvml, device)
        named = {"uuid": _text(nvml.nvmlDeviceGetUUID(device)), "name": _text(nvml.nvmlDeviceGetName(device))}
    except nvml.NVMLError:  # "[N/A]": its memory is the machine's; or it was lost just now
        return {}
    total = memory.total - getattr(memory, "reserved", 0)
    return named | {"total": total, "free": memory.free, "held": _held(nvml, device, total - memory.free)}


def _memory(nvml: Any, device: Any) -> Any:
    """Returns the driver's figures. Only the second version of the call tells what the driver keeps for itself, half a
    percent of a card (NVML: nvmlDeviceGetMemoryInfo_v2)."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(device, nvml.nvmlMemory_v2)
    except nvml.NVMLError:  # a driver before 510
        return nvml.nvmlDeviceGetMemoryInfo(device)


def _held(nvml: Any, device: Any, used: int) -> dict[int, int] | None:
    """Returns bytes by process ID; None if a figure is hidden, or the driver names no process though memory is `used`:
    a container with process IDs of its own sees none."""
    held: dict[int, int] = {}
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            processes = ask(device)
        except nvml.NVMLError:
            continue
        for process in processes:
            if process.usedGpuMemory in (None, _HIDDEN):
                return None
            held[process.pid] = max(held.get(process.pid, 0), process.usedGpuMemory)
    return held if held or used < _UNUSED else None


def _number(nvml: Any, ask: Callable[[], int]) -> int | None:
    try:
        return int(ask())
    except nvml.NVMLError:
        return None


def _busy(nvml: Any, card: Any) -> int:
    return int(nvml.nvmlDeviceGetUtilizationRates(card).gpu)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    import pynvml

    try:
        print(json.dumps(read(pynvml)))
    except pynvml.NVMLError as error:
        raise SystemExit(f"NVIDIA's driver: {error}") from None
