"""Finds GPUs with a memory of their own: their total and free memory, and the memory that each process holds.

NVIDIA's figures come from `nvidia-smi`: every driver brings it, it needs no package, and where a broken driver hangs, a
child process hangs and no thread of the daemon. AMD's figures come from sysfs. A GPU that shares the main memory
(Apple, Jetson) does not count.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT = 10.0  # seconds
_TRIES = 3
_APPS = "--query-compute-apps=pid,gpu_uuid,used_memory"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device. `held` is by process ID, None if the driver does not say."""

    total: int
    free: int
    held: Mapping[int, int] | None = None


NO_MEMORY = DeviceMemory(0, 0, {})
"""A device that does not answer. It keeps its number, and nothing is started on it."""


def devices(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[DeviceMemory, ...]:
    """Returns the devices in the order of an engine started with this environment and CUDA_DEVICE_ORDER=PCI_BUS_ID.
    Raises `TimeoutError` if the driver does not answer."""
    return _nvidia(environ) or _amd(environ, root)


def held_by(found: Iterable[DeviceMemory], pids: Iterable[int]) -> tuple[int, ...]:
    """Bytes that these processes hold of each device; empty if a driver does not say."""
    told, pids = [device.held for device in found], set(pids)
    return () if None in told else tuple(sum(held.get(pid, 0) for pid in pids) for held in told if held is not None)


def _nvidia(environ: Mapping[str, str]) -> tuple[DeviceMemory, ...]:
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return ()
    for _ in range(_TRIES):  # a process that ends between two queries would hold what is free
        before = _rows(program, _APPS)
        gpus = _rows(program, "--query-gpu=index,uuid,memory.total,memory.free")
        after = _rows(program, _APPS) if gpus else before
        if {tuple(row[:2]) for row in before} == {tuple(row[:2]) for row in after}:
            break
    known = [gpu for gpu in gpus if len(gpu) == 4 and gpu[2].isdecimal() and gpu[3].isdecimal()]
    if not known:
        return ()  # "[N/A]": the memory is the machine's
    held = _held(after)
    return tuple(
        DeviceMemory(int(gpu[2]) * MIB, int(gpu[3]) * MIB, None if held is None else held.get(gpu[1], {}))
        if gpu in known
        else NO_MEMORY
        for gpu in _visible(gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    )


hung_queries: list[subprocess.Popen[str]] = []  # the query that a broken driver does not let end, if there is one


def _rows(program: str, query: str) -> list[list[str]]:
    """Returns nothing if the program fails: there is no driver, or no device."""
    if hung_queries and hung_queries[0].poll() is None:
        raise TimeoutError("nvidia-smi hangs, and cannot be ended: the driver does not answer")
    hung_queries.clear()
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return []
    try:
        output, _ = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        hung_queries.append(process)
        raise TimeoutError(f"nvidia-smi did not answer within {_TIMEOUT:g} s") from None
    lines = output.splitlines() if process.returncode == 0 else []
    return [[field.strip() for field in line.split(",")] for line in lines if line.strip()]


def _held(rows: Iterable[list[str]]) -> dict[str, dict[int, int]] | None:
    """Bytes by device and process. None if a figure is hidden, or if there is no process at all: a container with
    process IDs of its own sees none."""
    found: dict[str, dict[int, int]] = {}
    for row in rows:
        if len(row) != 3 or not row[0].isdecimal() or not row[2].isdecimal():
            return None
        pid, uuid, used = row
        processes = found.setdefault(uuid, {})
        processes[int(pid)] = processes.get(int(pid), 0) + int(used) * MIB
    return found or None


def _visible(gpus: list[list[str]], chosen: str | None) -> list[list[str]]:
    """The chosen GPUs as CUDA selects them: numbers or beginnings of UUIDs, in that order, up to the first unknown
    one."""
    if chosen is None:
        return gpus
    found = []
    for name in map(str.strip, chosen.split(",")):
        match = [gpu for gpu in gpus if name == gpu[0] or (name.startswith("GPU-") and gpu[1].startswith(name))]
        if len(match) != 1 or match[0] in found:
            break
        found += match
    return found


def _amd(environ: Mapping[str, str], root: Path) -> tuple[DeviceMemory, ...]:
    """Sorts by PCI address, as ROCm does. sysfs does not say how much a process holds."""
    folders = {card.resolve() for card in (root / "sys/class/drm").glob("card*/device")}
    cards = [[str(number), "", str(folder)] for number, folder in enumerate(sorted(filter(_has_memory, folders)))]
    chosen = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
    return tuple(_amd_device(Path(folder)) for _, _, folder in _visible(cards, chosen))


def _has_memory(folder: Path) -> bool:
    return (folder / "mem_info_vram_total").exists() and (folder / "mem_info_vram_used").exists()


def _amd_device(folder: Path) -> DeviceMemory:
    total, used = (int((folder / f"mem_info_vram_{what}").read_text("ascii")) for what in ("total", "used"))
    return DeviceMemory(total, max(0, total - used))
