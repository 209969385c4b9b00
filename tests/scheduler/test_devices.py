"""Devices, as made-up drivers and engines tell of them."""

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from modelrunner.processes.query import hung, output_of
from modelrunner.scheduler import nvml
from modelrunner.scheduler.devicememory import DeviceMemory, EngineOnDevices
from modelrunner.scheduler.devices import Device, devices, held_by, joined, nvidia_cards, visible
from modelrunner.scheduler.memory import BUDGET_LOOK, MemoryProbe
from modelrunner.types import EngineDevice, RequiredMemory
from tests.waiting import HUNG

GIB = 1 << 30


class NVMLError(Exception):
    """As pynvml's: not supported, hidden, or lost."""


@dataclass
class Gpu:
    """A card or MIG instance of the made-up driver. A figure of None is "[N/A]". `total` is without what the driver has
    `reserved`, which an old one does not tell."""

    uuid: str
    total: int | None = 24 * GIB
    free: int = 20 * GIB
    processes: Sequence[tuple[int, int | None]] = ((41, 3 * GIB),)
    address: str = "00000000:01:00.0"
    temperature: int | None = 61
    lost: bool = False
    reserved: int = GIB // 2
    is_old: bool = False
    instances: Sequence["Gpu"] = field(default=())


class Driver:
    """The functions of pynvml that are used, over made-up cards."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x02000028

    def __init__(self, *cards: Gpu) -> None:
        self.cards = cards

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if self.cards[index].lost:
            raise NVMLError("GPU is lost")
        return self.cards[index]

    def nvmlDeviceGetPciInfo(self, card: Gpu) -> SimpleNamespace:
        return SimpleNamespace(busId=card.address.encode())

    def nvmlDeviceGetTemperature(self, card: Gpu, sensor: int) -> int:
        return _or_unsupported(card.temperature)

    def nvmlDeviceGetUtilizationRates(self, card: Gpu) -> SimpleNamespace:
        if card.instances:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=7)

    def nvmlDeviceGetMigMode(self, card: Gpu) -> list[int]:
        if not card.instances:
            raise NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Gpu, index: int) -> Gpu:
        if index >= len(card.instances):
            raise NVMLError("Not Found")
        return card.instances[index]

    def nvmlDeviceGetMemoryInfo(self, card: Gpu, version: int = 1) -> SimpleNamespace:
        total = _or_unsupported(card.total)
        if version == 1:
            return SimpleNamespace(total=total + card.reserved, free=card.free)
        if card.is_old:
            raise NVMLError("Function Not Found")
        return SimpleNamespace(total=total + card.reserved, free=card.free, reserved=card.reserved)

    def nvmlDeviceGetUUID(self, card: Gpu) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: Gpu) -> str:
        return "NVIDIA A30"

    def nvmlDeviceGetComputeRunningProcesses(self, card: Gpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in card.processes]

    nvmlDeviceGetGraphicsRunningProcesses = nvmlDeviceGetComputeRunningProcesses


def _or_unsupported(value: int | None) -> int:
    if value is None:
        raise NVMLError("Not Supported")
    return value


def ask(*cards: Gpu) -> tuple[Device, ...]:
    return nvidia_cards(json.dumps(nvml.read(Driver(*cards))))


def test_what_nvml_says() -> None:
    (found,) = ask(Gpu("GPU-aaaa"))
    expected = Device(24 * GIB, 20 * GIB, {41: 3 * GIB}, "NVIDIA A30", "NVIDIA", "0000:01:00.0", "GPU-aaaa", 7, 61)
    assert found == expected
    assert held_by([found], [41, 43]) == (3 * GIB,)


def test_cards_are_in_the_order_of_the_bus() -> None:
    cards = Gpu("GPU-b", address="00000000:41:00.0"), Gpu("GPU-a", address="00000000:01:00.0")
    assert [card.uuid for card in ask(*cards)] == ["GPU-a", "GPU-b"]


def test_each_instance_of_a_divided_card_is_a_device() -> None:
    instances = [Gpu(f"MIG-{i}", 6 * GIB, 5 * GIB, [(40 + i, GIB)]) for i in range(2)]
    found = ask(Gpu("GPU-aaaa", instances=instances), Gpu("GPU-bbbb", address="00000000:02:00.0"))
    assert [(d.uuid, d.total // GIB, d.held, d.utilization) for d in found] == [
        ("MIG-0", 6, {40: GIB}, None),
        ("MIG-1", 6, {41: GIB}, None),
        ("GPU-bbbb", 24, {41: 3 * GIB}, 7),
    ]
    assert [d.uuid for d in visible(found, "MIG-1")] == ["MIG-1"]


@pytest.mark.parametrize("processes", [[], [(41, None)], [(41, (1 << 64) - 1)]], ids=["a container", "WSL", "hidden"])
def test_what_a_process_holds_may_be_told_by_nobody(processes: list[tuple[int, int | None]]) -> None:
    found = ask(Gpu("GPU-aaaa", processes=processes, temperature=None))
    assert (found[0].held, found[0].temperature) == (None, None)
    assert held_by(found, [41]) == ()


def test_nobody_holds_memory_of_a_card_that_is_not_used() -> None:
    (found,) = ask(Gpu("GPU-aaaa", free=24 * GIB, processes=[]))
    assert (found.total, found.free, held_by([found], [41])) == (24 * GIB, 24 * GIB, (0,))
    (old,) = ask(Gpu("GPU-aaaa", free=24 * GIB, processes=[], is_old=True))
    assert held_by([old], [41]) == ()


def test_a_lost_card_and_one_that_shares_the_main_memory_are_left_out() -> None:
    assert ask(Gpu("GPU-aaaa", lost=True), Gpu("GPU-bbbb", None), Gpu("GPU-cccc"))[0].uuid == "GPU-cccc"


@pytest.mark.parametrize(
    ("chosen", "uuids"),
    [("2,0", ["abcd", "aaaa"]), ("GPU-bb", ["bbbb"]), ("1,7,0", ["bbbb"]), ("", []), ("-1", []), ("GPU-a", [])],
)
def test_cudas_own_choice_of_devices_and_their_order(chosen: str, uuids: list[str]) -> None:
    found = visible(ask(*[Gpu(f"GPU-{name}") for name in ("aaaa", "bbbb", "abcd")]), chosen)
    assert [device.uuid for device in found] == [f"GPU-{name}" for name in uuids]


@pytest.mark.parametrize("text", ["", "NVML: Driver/library version mismatch", "[1]", '[{"address": "x"}]'])
def test_a_driver_may_say_anything(text: str) -> None:
    with pytest.raises(OSError, match="NVIDIA's driver"):
        nvidia_cards(text)


def test_no_driver_is_no_device_and_costs_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("a process"))
    assert devices({}, tmp_path) == ()


def test_one_card_that_two_engines_name_differently_is_one_device() -> None:
    cards = ask(Gpu("GPU-a"), Gpu("GPU-b", address="00000000:02:00.0"))
    lists = {
        "llama.cpp": [  # without addresses, as llama-server prints them
            EngineDevice("Vulkan0", "NVIDIA A30", 24 * GIB, 20 * GIB),
            EngineDevice("Vulkan1", "llvmpipe (LLVM 15.0.6, 256 bits)", 2 * GIB, 2 * GIB),
        ],
        "vllm": [
            EngineDevice("cuda:0", "NVIDIA A30", 24 * GIB, 20 * GIB, "GPU-b"),
            EngineDevice("cuda:1", "NVIDIA A30", 24 * GIB, 20 * GIB, "0000:01:00.0"),
        ],
        "other": [EngineDevice("0", "llvmpipe (LLVM 15.0.6, 256 bits)", 2 * GIB, 2 * GIB)],
    }
    found, numbers = joined(cards, lists)
    assert numbers == {"llama.cpp": (0, 2), "vllm": (1, 0), "other": (2,)}
    assert [device.names for device in found] == [
        {"llama.cpp": "Vulkan0", "vllm": "cuda:1"},
        {"vllm": "cuda:0"},
        {"llama.cpp": "Vulkan1", "other": "0"},
    ]
    assert [device.total // GIB for device in found] == [24, 24, 2]


def test_a_card_of_another_vendor_is_another_device(tmp_path: Path) -> None:
    card(tmp_path, "card0", "0000:03:00.0", 16 * GIB, 1 * GIB)
    cards = (*ask(Gpu("GPU-a", 16 * GIB)), *devices({}, tmp_path))
    lists = {"llama.cpp": [EngineDevice("Vulkan0", "AMD Radeon RX 7800 XT (RADV NAVI32)", 16 * GIB, 15 * GIB)]}
    assert joined(cards, lists)[1] == {"llama.cpp": (1,)}


@pytest.mark.parametrize(
    "name",
    ["MTL0: Apple M3 Max", "Vulkan0: Intel(R) UHD Graphics 770 (ADL-S GT1)", "Vulkan0: AMD Radeon 780M (RADV PHOENIX)"],
)
def test_graphics_that_share_the_main_memory_have_no_budget(name: str) -> None:
    number, _, product = name.partition(": ")
    shared = EngineDevice(number, product, 32 * GIB, 30 * GIB)
    assert joined((), {"llama.cpp": [shared]}) == ((), {"llama.cpp": ()})
    cards = ask(Gpu("GPU-a"))
    beside = [shared, EngineDevice("Vulkan1", "NVIDIA A30", 24 * GIB, 20 * GIB)]
    assert joined(cards, {"llama.cpp": beside})[1] == {"llama.cpp": (-1, 0)}


def test_an_engine_that_still_lists_a_card_does_not_bring_it_back(tmp_path: Path) -> None:
    seen = [ask(Gpu("GPU-a"), Gpu("GPU-b", address="00000000:02:00.0")), ask(Gpu("GPU-b", address="00000000:02:00.0"))]
    listed = [EngineDevice(f"CUDA{i}", "NVIDIA A30", 24 * GIB, 20 * GIB) for i in range(2)]
    probe = MemoryProbe(7, 0, root=tmp_path, look=lambda: seen.pop(0), list_devices=lambda: {"llama.cpp": listed})
    probe.refresh({})
    assert (probe().vram, probe.numbers("llama.cpp")) == ((0, 20 * GIB), (0, 1))


def test_a_process_of_amds_holds_what_the_drm_says(tmp_path: Path) -> None:
    card(tmp_path, "card0", "0000:03:00.0", 16 * GIB, 1 * GIB)
    process = tmp_path / "proc/77"
    for number, client in (("5", "9"), ("6", "9"), ("7", "10")):
        (process / "fdinfo").mkdir(parents=True, exist_ok=True)
        (process / "fd").mkdir(exist_ok=True)
        (process / "fd" / number).symlink_to("/dev/dri/renderD128")
        (process / "fdinfo" / number).write_text(
            f"pos:\t0\ndrm-driver:\tamdgpu\ndrm-pdev:\t0000:03:00.0\ndrm-client-id:\t{client}\n"
            "drm-memory-vram:\t1048576 KiB\n"
        )
    (found,) = devices({}, tmp_path)
    assert held_by([found], [77]) == (2 * GIB,), "two clients; a second descriptor of one does not count"


def card(root: Path, name: str, address: str, total: int, used: int) -> None:
    folder = root / "sys/devices" / address
    folder.mkdir(parents=True)
    (folder / "mem_info_vram_total").write_text(f"{total}\n")
    (folder / "mem_info_vram_used").write_text(f"{used}\n")
    for entry in (name, f"{name}-DP-1"):
        (root / "sys/class/drm" / entry).mkdir(parents=True)
        (root / "sys/class/drm" / entry / "device").symlink_to(folder)


def test_amds_are_in_sysfs(tmp_path: Path) -> None:
    card(tmp_path, "card1", "0000:03:00.0", 16 * GIB, 1 * GIB)
    card(tmp_path, "card0", "0000:0a:00.0", 8 * GIB, 2 * GIB)

    def seen(**environ: str) -> list[tuple[int, int, str, str]]:
        return [(d.total // GIB, d.free // GIB, d.vendor, d.address) for d in devices(environ, tmp_path)]

    assert seen() == [(16, 15, "AMD", "0000:03:00.0"), (8, 6, "AMD", "0000:0a:00.0")]
    assert seen(HIP_VISIBLE_DEVICES="1") == [(8, 6, "AMD", "0000:0a:00.0")]


def intel(root: Path, address: str, *tiles: int) -> Path:
    """A card of Intel's: xe tells the memory of each tile, i915 and the graphics of a processor nothing."""
    folder = root / "sys/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x8086\n")
    for number, size in enumerate(tiles):
        (folder / f"tile{number}").mkdir()
        (folder / f"tile{number}/physical_vram_size_bytes").write_text(f"{size}\n")
    entry = root / f"sys/class/drm/card{address[5:7]}"
    entry.mkdir(parents=True)
    (entry / "device").symlink_to(folder)
    return folder


def test_intels_cards_are_in_sysfs_and_the_graphics_of_its_processors_are_none(tmp_path: Path) -> None:
    intel(tmp_path, "0000:00:02.0")
    intel(tmp_path, "0000:03:00.0", 12 * GIB)
    intel(tmp_path, "0000:04:00.0", 64 * GIB, 64 * GIB)
    process = tmp_path / "proc/77"
    (process / "fdinfo").mkdir(parents=True)
    (process / "fd").mkdir()
    (process / "fd/5").symlink_to("/dev/dri/renderD128")
    (process / "fdinfo/5").write_text("drm-pdev:\t0000:03:00.0\ndrm-client-id:\t9\ndrm-resident-vram0:\t1048576 KiB\n")
    found = devices({}, tmp_path)
    assert [(d.address, d.vendor, d.total // GIB, d.free // GIB) for d in found] == [
        ("0000:03:00.0", "Intel", 12, 11),
        ("0000:04:00.0", "Intel", 128, 128),
    ]
    assert held_by(found[:1], [77]) == (GIB,)
    probe = MemoryProbe(7, 0, root=tmp_path, look=lambda: found)
    assert probe().vram == (11 * GIB, 128 * GIB)


def test_a_card_whose_driver_is_silent_has_the_memory_that_an_engine_lists(tmp_path: Path) -> None:
    intel(tmp_path, "0000:00:02.0")
    intel(tmp_path, "0000:03:00.0")
    (card,) = devices({}, tmp_path)
    assert card.total == 0
    listed = [EngineDevice("Vulkan0", "Intel(R) Arc(tm) A770 Graphics (DG2)", 16 * GIB, 15 * GIB)]
    found, numbers = joined([card], {"llama.cpp": listed})
    assert [(device.total // GIB, device.free // GIB, device.address) for device in found] == [(16, 15, "0000:03:00.0")]
    assert numbers == {"llama.cpp": (0,)}


def test_the_budget_of_a_device_is_what_others_leave_less_a_tenth(tmp_path: Path) -> None:
    me = os.getpid()
    seen = (Device(100, 30, {me: 40, 1: 30}), Device(200, 150), Device(50, 50, {}))
    probe = MemoryProbe(7, root=tmp_path, look=lambda: seen)
    assert probe() == RequiredMemory(7, (20, 130, 45))
    probe.refresh({me: RequiredMemory(0, (99, 10, 99))})
    assert probe() == RequiredMemory(7, (60, 140, 45))
    probe.set_limits(7, 0)
    assert probe().vram == (70, 160, 50)


def test_an_engine_that_ends_leaves_its_memory_to_others_at_once(tmp_path: Path) -> None:
    """The driver's old figures do not count with today's processes."""
    now, me, free = [0.0], os.getpid(), [20]
    looks: list[Device] = []

    def look() -> tuple[Device, ...]:
        looks.append(Device(100, free[0], {me: 80}))
        return (looks[-1],)

    probe = MemoryProbe(7, 0, root=tmp_path, look=look, clock=lambda: now[0])
    probe.refresh({me: RequiredMemory(0, (80,))})
    assert probe().vram == (100,)
    now[0] = 1.2
    assert probe({}).vram == (100,)
    end_looks()
    assert probe({}).vram == (100,), "though the driver was not asked since"
    assert len(looks) == 2


@pytest.mark.parametrize("plan", [0.0, 0.5, 1.0, 1.7])
def test_what_other_programs_take_is_known_within_five_seconds(tmp_path: Path, plan: float) -> None:
    """To who looks as often as the scheduler does, whenever a plan looked between."""
    now, free = [100.0], [20]
    probe = MemoryProbe(7, 0, root=tmp_path, look=lambda: (Device(24, free[0]),), clock=lambda: now[0])

    def look(at: float) -> tuple[int, ...]:
        now[0] = at
        found = probe({}).vram
        end_looks()
        return found

    look(100.0)
    look(100.0 + plan)
    free[0], taken = 10, now[0]
    looks = iter(range(1, 100))
    while look(100.0 + next(looks) * BUDGET_LOOK) == (20,):
        assert now[0] - taken < 5.0
    assert now[0] - taken < 5.0


def end_looks() -> None:
    for thread in [t for t in threading.enumerate() if t.name == "memory probe"]:
        thread.join()


def test_a_driver_that_does_not_answer_leaves_the_last_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now, seen = [0.0], [Device(100, 50)]

    def look() -> tuple[Device, ...]:
        return (seen.pop(),) if seen else _hang()

    probe = MemoryProbe(7, 0, root=tmp_path, look=look, clock=lambda: now[0])
    for now[0], expected in ((59.0, 50), (61.0, 0)):  # a minute later it counts as gone
        probe.refresh({})
        assert probe().vram == (expected,)
    seen.append(Device(100, 40))
    probe.refresh({})
    assert probe().vram == (40,)
    assert [record.args for record in caplog.records] == [
        ("the driver did not answer: the last figures stay",),
        ("the driver did not answer: no device is used",),
        ("all answer again",),
    ]


def _hang() -> tuple[Device, ...]:
    raise TimeoutError("the driver did not answer")


def test_a_call_never_waits_for_a_look(tmp_path: Path) -> None:
    """A thread makes the next one, and a single one at a time."""
    now, looks, gate = [0.0], [0], threading.Event()

    def look() -> tuple[Device, ...]:
        looks[0] += 1
        assert looks[0] == 1 or gate.wait(HUNG)
        return (Device(100, looks[0]),)

    probe = MemoryProbe(7, 0, root=tmp_path, look=look, clock=lambda: now[0])
    now[0] = 60.0
    assert [probe().vram for _ in range(3)] == [(1,)] * 3
    (thread,) = [t for t in threading.enumerate() if t.name == "memory probe"]
    gate.set()
    thread.join()
    assert (probe().vram, looks[0]) == ((2,), 2)


def test_a_driver_that_hangs_does_not_hold_up_the_start(tmp_path: Path) -> None:
    gate = threading.Event()

    def look() -> tuple[Device, ...]:
        assert gate.wait(HUNG)
        return (Device(100, 50),)

    probe = MemoryProbe(7, 0, root=tmp_path, look=look, patience=0)
    (thread,) = [t for t in threading.enumerate() if t.name == "memory probe"]
    assert probe() == RequiredMemory(7)
    gate.set()
    thread.join()
    assert probe() == RequiredMemory(7, (50,))


def test_a_device_that_is_gone_keeps_its_number(tmp_path: Path) -> None:
    first, second = ask(Gpu("GPU-a", free=9 * GIB), Gpu("GPU-b", address="00000000:02:00.0"))
    seen = [(first, second), (second,), (first, second)]
    probe = MemoryProbe(7, 0, root=tmp_path, look=lambda: seen.pop(0))
    assert probe().vram == (9 * GIB, 20 * GIB)
    probe.refresh({})
    assert probe().vram == (0, 20 * GIB)
    assert [device.fault for device in probe.devices()] == ["it does not answer", ""]
    probe.refresh({})
    assert probe().vram == (9 * GIB, 20 * GIB)


def test_a_device_that_only_an_engine_knows_has_a_budget_too(tmp_path: Path) -> None:
    listed = [EngineDevice(f"Vulkan{i}", "llvmpipe", 2 * GIB, 2 * GIB) for i in range(2)]
    probe = MemoryProbe(7, 0, root=tmp_path, look=lambda: (), list_devices=lambda: {"llama.cpp": listed, "cpu": []})
    for _ in range(2):
        assert probe().vram == (2 * GIB, 2 * GIB)
        assert (probe.numbers("llama.cpp"), probe.numbers("cpu"), probe.numbers("x")) == ((0, 1), (), None)
        probe.refresh({})


def test_a_figure_of_an_engines_list_does_not_grow_by_what_runners_take(tmp_path: Path) -> None:
    """Another program held 1 GiB when the engine was asked, and the list is not made again."""
    listed = [EngineDevice("Vulkan0", "llvmpipe", 3 * GIB, 2 * GIB)]
    probe = MemoryProbe(7, 0, root=tmp_path, look=lambda: (), list_devices=lambda: {"llama.cpp": listed})
    probe.refresh({os.getpid(): RequiredMemory(0, (2 * GIB,))})
    assert probe().vram == (2 * GIB,)


def test_a_program_that_cannot_be_ended_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "driver"
    program.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/asked\nexec sleep {HUNG}\n")
    program.chmod(0o755)
    monkeypatch.setattr("subprocess.Popen.kill", lambda process: None)  # it waits for the device, and no signal helps
    for expected in ("within 0.5 s", "cannot be ended"):
        with pytest.raises(TimeoutError, match=expected):
            output_of([program], timeout=0.5)
    assert len((tmp_path / "asked").read_text().split()) == 1
    monkeypatch.undo()
    process = hung.pop((str(program),))
    process.kill()
    process.communicate()


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(OSError, match="sh failed with status 3: no such device"):
        output_of(["sh", "-c", "echo no such device >&2; exit 3"])


class Hiding:
    """Two cards whose driver tells nothing of processes once one uses them, as in a container."""

    def __init__(self) -> None:
        self.taken = [0, 0]

    def __call__(self) -> tuple[Device, ...]:
        return tuple(
            Device(100, 90 - size, None if size else {}, "NVIDIA A30", "NVIDIA", f"0000:0{number}:00.0")
            for number, size in enumerate(self.taken)
        )

    def take(self, *sizes: int) -> None:
        self.taken = [before + size for before, size in zip(self.taken, sizes, strict=True)]


def begun(machine: DeviceMemory) -> EngineOnDevices:
    engine = EngineOnDevices(machine)
    engine.begin()
    return engine


def test_where_processes_are_hidden_a_load_is_measured_by_what_is_less_free() -> None:
    driver = Hiding()
    machine = DeviceMemory(driver, tuple)
    first = begun(machine)
    driver.take(0, 30)
    assert first.held(os.getpid(), (0, 40)) == (0, 30)
    second = begun(machine)
    driver.take(20, 25)
    assert second.held(os.getpid(), (20, 20)) == (20, 25)
    assert first.held(os.getpid(), (0, 40)) == (0, 30), "what came later is not its own"
    second.end()
    assert second.held(os.getpid(), (20, 20)) == ()
    assert first.held(os.getpid(), (0, 40)) == (0, 30)


@pytest.mark.parametrize("taken", [0, 19, 61])
def test_a_difference_far_from_what_was_planned_is_another_programs(taken: int) -> None:
    driver = Hiding()
    driver.take(10, 0)
    engine = begun(DeviceMemory(driver, tuple))
    driver.take(taken, 0)
    assert engine.held(os.getpid(), (40,)) == ()


def test_a_difference_counts_only_if_no_other_engine_began_or_ended_meanwhile() -> None:
    driver = Hiding()
    machine = DeviceMemory(driver, tuple)
    old = begun(machine)
    driver.take(10, 0)
    assert old.held(os.getpid(), (10,)) == (10, 0)
    loading = begun(machine)
    beside = begun(machine)
    driver.take(40, 0)
    for engine in (loading, beside):
        assert engine.held(os.getpid(), (40,)) == ()
    later = begun(machine)
    old.end()
    driver.take(20, 0)
    assert later.held(os.getpid(), (20,)) == ()
    last = begun(machine)
    driver.take(0, 20)
    assert last.held(os.getpid(), (0, 20)) == (0, 20)


def test_a_driver_that_tells_is_asked_once_for_each_measurement() -> None:
    looks = []

    def look() -> tuple[Device, ...]:
        looks.append(1)
        return (Device(100, 40, {os.getpid(): 50}, "NVIDIA A30", "NVIDIA"),)

    machine = DeviceMemory(look, tuple)
    for expected in (2, 3):  # the first time nobody knows whether it tells
        assert begun(machine).held(os.getpid(), (70,)) == (50,)
        assert len(looks) == expected


def test_what_is_held_has_the_numbers_of_the_budget() -> None:
    """Device 0 fell off the bus, and the driver counts the others anew."""
    first, second = ask(Gpu("GPU-a"), Gpu("GPU-b", address="00000000:02:00.0", processes=((os.getpid(), GIB),)))
    machine = DeviceMemory(lambda: (second,), lambda: (first, second))
    assert begun(machine).held(os.getpid(), (0, GIB)) == (0, GIB)
