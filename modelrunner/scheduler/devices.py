"""The devices of this machine: GPUs with a memory of their own, and whatever an engine computes on.

NVIDIA's figures come from NVML (nvml.py, in a process that may hang), those of AMD and Intel from sysfs, and the memory
of their processes from the DRM (Linux: Documentation/gpu/drm-usage-stats.rst). Engines list their devices, too:
`joined` finds the card behind each, so that a card counts once, whatever an engine calls it. A GPU that shares the main
memory (Apple, Jetson) does not count."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelrunner.processes.query import output_of
from modelrunner.types import EngineDevice
from modelrunner.units import format_bytes

_NVML = Path(__file__).with_name("nvml.py")
_NVIDIA_DRIVER = ("dev/nvidiactl", "dev/dxg")  # on WSL the driver has no device file of its own
_VENDORS = {"0x1002": "AMD", "0x8086": "Intel"}  # of PCI, whose figures are in sysfs
_WORDS = {
    "NVIDIA": ("nvidia", "geforce", "quadro", "tesla", "cuda"),
    "AMD": ("amd", "radeon", "radv", "rocm", "hip"),
    "Intel": ("intel", "arc", "sycl", "level_zero"),
    "Apple": ("apple", "metal", "mtl"),
}
_GRAPHICS_OF_INTEL = "0000:00:02.0"  # the place of a processor's own on the PCI bus, with every driver
_SILENT = "it does not answer"
_ALIKE = 0.1  # part of a card's memory by which two drivers' figures of it may differ


@dataclass(frozen=True, slots=True)
class Device:
    """A device with its present figures."""

    #: Bytes.
    total: int
    #: Bytes that nobody holds, or held when the engine listed the device (`is_listed`).
    free: int
    #: Bytes by process ID, None if the driver does not say.
    held: Mapping[int, int] | None = None
    name: str = ""
    #: NVIDIA, AMD, Intel, or "" for a device that only an engine knows.
    vendor: str = ""
    #: The address on the PCI bus, such as 0000:01:00.0, or "".
    address: str = ""
    uuid: str = ""
    #: Percent of the time, None if the driver does not say.
    utilization: int | None = None
    #: Degrees Celsius, None if the driver does not say.
    temperature: int | None = None
    #: What each engine calls it, by backend: CUDA0, Vulkan1.
    names: Mapping[str, str] | None = None
    #: Its figures are those of an engine's list, and stay as they were when the engine was asked.
    is_listed: bool = False
    #: Why it is not used, "" for one that works.
    fault: str = ""
    #: Bytes that other programs hold, as far as they can be told from what our runners do.
    others: int = 0

    @property
    def id(self) -> str:
        """Returns what tells it from others for as long as the machine runs, as far as something does."""
        return self.uuid or self.address or self.name

    @property
    def hides_processes(self) -> bool:
        """Returns True if its driver does not say what a process holds."""
        return self.held is None and bool(self.vendor) and not self.is_listed


def kind_of(machine: str, there: Sequence[Device], numbers: Iterable[int]) -> str:
    """Returns the kind of hardware (`Host.kind`) of the devices with these `numbers` out of those that are `there`;
    `machine` is the processor's architecture."""
    chosen = [there[number] for number in numbers if number < len(there)]
    return ", ".join((machine, *[f"{device.name} {format_bytes(device.total)}".strip() for device in chosen]))


def out_of_use(there: Sequence[Device], budget: Sequence[int]) -> Iterator[str]:
    """Yields a sentence about each device that a plan can hardly use: it is gone, or other programs fill it. `budget`
    are the bytes that our runners may hold of each."""
    for number, (device, room) in enumerate(zip(there, budget, strict=False)):
        if device.fault:
            yield f"device {number} ({device.name}) is not used: {device.fault}"
        elif device.others and room < device.total // 10:
            yield f"other programs hold {format_bytes(device.others)} of device {number} ({device.name})"


def devices(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[Device, ...]:
    """Returns the devices that drivers know: NVIDIA's as an engine counts them that is started with this environment
    and CUDA_DEVICE_ORDER=PCI_BUS_ID, then the others by PCI address. Raises `OSError` if a driver fails, `TimeoutError`
    if it does not answer."""
    return (*_nvidia(environ, root), *_cards(environ, root))


def held_by(seen: Iterable[Device], pids: Iterable[int]) -> tuple[int, ...]:
    """Bytes that these processes hold of each device; empty if a driver does not say."""
    held, pids = [device.held for device in seen], set(pids)
    return () if None in held else tuple(sum(each.get(pid, 0) for pid in pids) for each in held if each is not None)


def joined(
    cards: Sequence[Device], lists: Mapping[str, Sequence[EngineDevice]]
) -> tuple[tuple[Device, ...], dict[str, tuple[int, ...]]]:
    """Joins the drivers' cards with what each backend's engine lists. Returns all devices, those that no driver knows
    last, and for each backend the number among them of each device in the engine's order: -1 for a GPU of a vendor
    behind which no driver knows a memory, since it shares the main memory. An engine that has only such ones has no
    device."""
    devices, numbers = list(cards), dict[str, tuple[int, ...]]()
    for backend, listed in lists.items():
        taken: list[int] = []
        for device in listed:
            number = _card_of(device, devices, taken)
            if number is None and _vendor(device):
                taken.append(-1)
                continue
            if number is None:
                number = len(devices)
                fault = "" if device.total else _SILENT
                devices.append(Device(0, 0, name=device.description, address=device.address, fault=fault))
            taken.append(number)
            known = devices[number]
            devices[number] = replace(known, names={**(known.names or {}), backend: device.name})
            if not known.total and not known.fault:  # its driver does not say
                devices[number] = replace(devices[number], total=device.total, free=device.free, is_listed=True)
        numbers[backend] = tuple(taken) if any(number >= 0 for number in taken) else ()
    return tuple(devices), numbers


def _card_of(device: EngineDevice, cards: Sequence[Device], taken: Sequence[int]) -> int | None:
    """Returns the number of the engine's device: the card with its address; without one the first card of its vendor,
    or device of its name, that is as large."""
    free = [number for number in range(len(cards)) if number not in taken]
    if device.address:
        wanted = _plain(device.address)
        same = [n for n in free if wanted in (_plain(cards[n].address), _plain(cards[n].uuid))]
        if same:
            return same[0]
    vendor = _vendor(device)
    for n in free:
        card = cards[n]
        alike = not card.total or abs(card.total - device.total) <= _ALIKE * card.total
        elsewhere = device.address and card.address
        if alike and not elsewhere and (vendor == card.vendor if card.vendor else device.description == card.name):
            return n
    return None


def _vendor(device: EngineDevice) -> str:
    """Returns the maker of the engine's device, "" for one that is no GPU, such as a processor that plays one, or that
    a server has, whatever its host is called."""
    if device.name.startswith("RPC"):
        return ""
    words = f"{device.name} {device.description}".lower().replace("(", " ").split()
    return next((v for v, begins in _WORDS.items() if any(word.startswith(begins) for word in words)), "")


def _plain(address: str) -> str:
    """Returns an address or UUID as everybody writes it: NVML gives a PCI domain eight digits."""
    text = address.lower().removeprefix("gpu-")
    return text[4:] if len(text) == len("00000000:01:00.0") and text.startswith("0000") else text


def in_old_places(cards: Sequence[Device], before: Sequence[Device]) -> list[Device]:
    """Returns the drivers' cards, each with the number that it had, and a fault for one that is gone. Devices that only
    an engine knew are left to `joined`, which adds them in the engine's order, unless a card comes after them."""
    old = [device for device in before if device.vendor or not device.names]
    left = list(cards)
    placed: list[Device] = []
    for device in old:
        here = next((card for card in left if card.id == device.id), None)
        if here is not None:
            left.remove(here)
        placed.append(here or lost(device, _SILENT))
    return placed + left


def lost(device: Device, fault: str) -> Device:
    """Returns a device that cannot be used, and why."""
    return replace(device, total=0, free=0, held={}, others=0, utilization=None, temperature=None, fault=fault)


def _nvidia(environ: Mapping[str, str], root: Path) -> tuple[Device, ...]:
    if not any((root / driver).exists() for driver in _NVIDIA_DRIVER):
        return ()
    return visible(nvidia_cards(output_of([sys.executable, "-I", _NVML])), environ.get("CUDA_VISIBLE_DEVICES"))


def nvidia_cards(text: str) -> tuple[Device, ...]:
    """Returns the devices that nvml.py printed. Raises `OSError` for other output."""
    try:
        return tuple([_nvidia_device(**fields) for fields in json.loads(text)])
    except (ValueError, TypeError) as error:
        raise OSError(f"NVIDIA's driver says what nobody understands: {error}") from None


def _nvidia_device(address: str, held: Mapping[str, int] | None, **fields: object) -> Device:
    by_pid = None if held is None else {int(pid): size for pid, size in held.items()}
    return Device(vendor="NVIDIA", address=_plain(address), held=by_pid, **fields)  # type: ignore[arg-type]


def visible(cards: tuple[Device, ...], chosen: str | None) -> tuple[Device, ...]:
    """Returns the chosen cards as CUDA selects them: numbers or beginnings of UUIDs, in that order, up to the first
    unknown one."""
    if chosen is None:
        return cards
    devices: list[Device] = []
    for name in map(str.strip, chosen.split(",")):
        by_id = [card for card in cards if name.startswith(("GPU-", "MIG-")) and card.uuid.startswith(name)]
        match = [cards[int(name)]] if name.isdecimal() and int(name) < len(cards) else by_id
        if len(match) != 1 or match[0] in devices:
            break
        devices += match
    return tuple(devices)


def _cards(environ: Mapping[str, str], root: Path) -> tuple[Device, ...]:
    """Returns the cards of sysfs, sorted by PCI address as ROCm sorts AMD's."""
    folders = sorted({card.resolve() for card in (root / "sys/class/drm").glob("card*/device")})
    cards = [card for folder in folders if (card := _card(folder)) is not None]
    if not cards:
        return ()
    amd = tuple(card for card in cards if card.vendor == "AMD")
    chosen = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
    cards = [*visible(amd, chosen), *[card for card in cards if card.vendor != "AMD"]]
    held = _drm_memory(root)
    return tuple(_with_held(card, held.get(card.address)) for card in cards)


def _with_held(card: Device, held: Mapping[int, int] | None) -> Device:
    """Returns the card with what processes hold. Intel's drivers have no other figure of what is free."""
    used = sum(held.values()) if held and card.vendor == "Intel" else 0
    return replace(card, held=held, free=max(0, card.free - used))


def _card(folder: Path) -> Device | None:
    """Returns a card with a memory of its own. Of Intel's drivers xe tells the memory of each tile (Linux:
    xe_tile_sysfs.c); i915 tells nothing, and a card that it drives has a total of 0 until an engine says more."""
    vendor = _VENDORS.get(_read(folder / "vendor"))
    total, used = (_figure(folder / f"mem_info_vram_{what}") for what in ("total", "used"))
    if vendor == "Intel":
        tiles = [_figure(file) or 0 for file in folder.glob("tile*/physical_vram_size_bytes")]
        total, used = (sum(tiles), 0) if tiles or folder.name != _GRAPHICS_OF_INTEL else (None, None)
    if total is None or used is None:
        return None
    temperatures = (_figure(file) for file in sorted(folder.glob("hwmon/hwmon*/temp1_input")))
    temperature = next(temperatures, None)
    return Device(
        total,
        max(0, total - used),
        name=_read(folder / "product_name") or f"{vendor or 'AMD'} {folder.name}",
        vendor=vendor or "AMD",
        address=folder.name,
        utilization=_figure(folder / "gpu_busy_percent"),
        temperature=None if temperature is None else temperature // 1000,
    )


def _drm_memory(root: Path) -> dict[str, dict[int, int]]:
    """Returns the bytes that each process holds, by PCI address. A client of the DRM counts once, though it may have
    several descriptors. Processes of other users cannot be read."""
    held: dict[str, dict[int, int]] = {}
    for folder in (root / "proc").glob("[0-9]*/fdinfo"):
        clients: dict[tuple[str, str], int] = {}
        for address, client, size in _drm_clients(folder):
            clients[address, client] = size
        for (address, _), size in clients.items():
            by_pid = held.setdefault(address, {})
            by_pid[int(folder.parent.name)] = by_pid.get(int(folder.parent.name), 0) + size
    return held


def _drm_clients(folder: Path) -> Iterator[tuple[str, str, int]]:
    try:
        descriptors = [fd.name for fd in (folder.parent / "fd").iterdir() if str(fd.readlink()).startswith("/dev/dri/")]
    except OSError:  # of another user, or ended
        return
    for name in descriptors:
        values = dict(line.split(":", 1) for line in _read(folder / name).splitlines() if ":" in line)
        memory = next((v for key in ("vram", "vram0", "local0") if (v := values.get(f"drm-resident-{key}"))), None)
        memory = memory or values.get("drm-memory-vram")
        if memory is not None and "drm-pdev" in values:
            number, _, unit = memory.strip().partition(" ")
            size = int(number) * {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}.get(unit, 1)
            yield values["drm-pdev"].strip(), values.get("drm-client-id", name).strip(), size


def _figure(file: Path) -> int | None:
    try:
        return int(_read(file), 0)
    except ValueError:
        return None


def _read(file: Path) -> str:
    try:
        return file.read_text("ascii", errors="replace").strip()
    except OSError:
        return ""
