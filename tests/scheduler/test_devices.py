"""Devices, as a made-up driver tells of them."""

import os
import threading
from pathlib import Path

import pytest

from modelrunner.scheduler.devices import MIB, DeviceMemory, devices, held_by, hung_queries
from modelrunner.scheduler.memory import MemoryProbe
from modelrunner.types import RequiredMemory
from tests.waiting import HUNG

GIB = 1 << 30
GPUS = "0, GPU-aaaa, 24576, 20000\n1, GPU-bbbb, 49152, 49000\n2, GPU-abcd, 8192, 100\n"
APPS = "41, GPU-aaaa, 300\n42, GPU-aaaa, 700\n42, GPU-bbbb, 50\n"


@pytest.fixture
def nvidia(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose `nvidia-smi` prints the files `gpus` and `apps`."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\ncase "$1 $2" in\n'
        f'"--query-gpu=index,uuid,memory.total,memory.free --format=csv,noheader,nounits") exec cat {tmp_path}/gpus;;\n'
        f'"--query-compute-apps=pid,gpu_uuid,used_memory --format=csv,noheader,nounits") exec cat {tmp_path}/apps;;\n'
        f"*) exit 2;;\nesac\n"
    )
    program.chmod(0o755)
    (tmp_path / "gpus").write_text(GPUS)
    (tmp_path / "apps").write_text(APPS)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def test_what_nvidia_smi_says(nvidia: dict[str, str], tmp_path: Path) -> None:
    found = devices(nvidia, tmp_path)
    assert found[0] == DeviceMemory(24576 * MIB, 20000 * MIB, {41: 300 * MIB, 42: 700 * MIB})
    assert [device.total // MIB for device in found] == [24576, 49152, 8192]
    assert held_by(found, [42, 43]) == (700 * MIB, 50 * MIB, 0)


@pytest.mark.parametrize(
    ("chosen", "totals"),
    [("2,0", [8192, 24576]), ("GPU-bb", [49152]), ("1,7,0", [49152]), ("", []), ("-1", []), ("GPU-a", [])],
)
def test_cudas_own_choice_of_devices_and_their_order(
    chosen: str, totals: list[int], nvidia: dict[str, str], tmp_path: Path
) -> None:
    found = devices(nvidia | {"CUDA_VISIBLE_DEVICES": chosen}, tmp_path)
    assert [device.total // MIB for device in found] == totals


def test_memory_that_is_the_machines_is_not_counted_again(nvidia: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "gpus").write_text("0, GPU-aaaa, [N/A], [N/A]\n")
    assert devices(nvidia, tmp_path) == ()


@pytest.mark.parametrize("apps", ["", "41, GPU-aaaa, [N/A]\n"], ids=["a container", "hidden"])
def test_what_a_process_holds_may_be_told_by_nobody(apps: str, nvidia: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "apps").write_text(apps)
    found = devices(nvidia, tmp_path)
    assert [device.held for device in found] == [None, None, None]
    assert held_by(found, [41]) == ()


def test_no_driver_is_no_device(nvidia: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "gpus").unlink()
    assert devices(nvidia, tmp_path) == ()
    assert devices({"PATH": str(tmp_path)}, tmp_path) == ()


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
    nowhere = {"PATH": str(tmp_path)}
    assert devices(nowhere, tmp_path) == (DeviceMemory(16 * GIB, 15 * GIB), DeviceMemory(8 * GIB, 6 * GIB))
    assert devices(nowhere | {"HIP_VISIBLE_DEVICES": "1"}, tmp_path) == (DeviceMemory(8 * GIB, 6 * GIB),)


def test_the_budget_of_a_device_is_what_others_leave_less_a_tenth(tmp_path: Path) -> None:
    me = os.getpid()
    seen = (DeviceMemory(100, 30, {me: 40, 1: 30}), DeviceMemory(200, 150), DeviceMemory(50, 50, {}))
    probe = MemoryProbe(7, root=tmp_path, look=lambda: seen)
    assert probe() == RequiredMemory(7, (20, 130, 45))
    probe.refresh({me: RequiredMemory(0, (99, 10, 99))})
    assert probe() == RequiredMemory(7, (60, 140, 45))
    probe.set_limits(7, 0)
    assert probe().vram == (70, 160, 50)


def test_an_engine_that_ends_leaves_its_memory_to_others_at_once(tmp_path: Path) -> None:
    """The driver's old figures do not count with today's processes."""
    now, me, free = [0.0], os.getpid(), [20]
    looks: list[DeviceMemory] = []

    def look() -> tuple[DeviceMemory, ...]:
        looks.append(DeviceMemory(100, free[0], {me: 80}))
        return (looks[-1],)

    probe = MemoryProbe(7, 0, root=tmp_path, look=look, clock=lambda: now[0])
    probe.refresh({me: RequiredMemory(0, (80,))})
    assert probe().vram == (100,)
    now[0] = 1.5
    assert probe({}).vram == (100,)
    for thread in [t for t in threading.enumerate() if t.name == "memory probe"]:
        thread.join()
    assert probe({}).vram == (100,), "though the driver was not asked since"
    assert len(looks) == 2


def test_a_driver_that_does_not_answer_leaves_the_last_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now, seen = [0.0], [DeviceMemory(100, 50)]

    def look() -> tuple[DeviceMemory, ...]:
        return (seen.pop(),) if seen else _hang()

    probe = MemoryProbe(7, 0, root=tmp_path, look=look, clock=lambda: now[0])
    for now[0], expected in ((59.0, 50), (61.0, 0)):  # a minute later it counts as gone
        probe.refresh({})
        assert probe().vram == (expected,)
    seen.append(DeviceMemory(100, 40))
    probe.refresh({})
    assert probe().vram == (40,)
    assert [record.args for record in caplog.records] == [
        ("nvidia-smi did not answer: the last figures stay",),
        ("nvidia-smi did not answer: no device is used",),
        ("all answer again",),
    ]


def _hang() -> tuple[DeviceMemory, ...]:
    raise TimeoutError("nvidia-smi did not answer")


def test_a_call_never_waits_for_a_look(tmp_path: Path) -> None:
    """A thread makes the next one, and a single one at a time."""
    now, looks, gate = [0.0], [0], threading.Event()

    def look() -> tuple[DeviceMemory, ...]:
        looks[0] += 1
        assert looks[0] == 1 or gate.wait(HUNG)
        return (DeviceMemory(100, looks[0]),)

    probe = MemoryProbe(7, 0, root=tmp_path, look=look, clock=lambda: now[0])
    now[0] = 60.0
    assert [probe().vram for _ in range(3)] == [(1,)] * 3
    (thread,) = [t for t in threading.enumerate() if t.name == "memory probe"]
    gate.set()
    thread.join()
    assert (probe().vram, looks[0]) == ((2,), 2)


def test_a_driver_that_hangs_does_not_hold_up_the_start(tmp_path: Path) -> None:
    gate = threading.Event()

    def look() -> tuple[DeviceMemory, ...]:
        assert gate.wait(HUNG)
        return (DeviceMemory(100, 50),)

    probe = MemoryProbe(7, 0, root=tmp_path, look=look, patience=0)
    (thread,) = [t for t in threading.enumerate() if t.name == "memory probe"]
    assert probe() == RequiredMemory(7)
    gate.set()
    thread.join()
    assert probe() == RequiredMemory(7, (50,))


def test_a_device_that_is_gone_keeps_its_number(nvidia: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "gpus").write_text(GPUS.replace("24576, 20000", "[GPU is lost], [GPU is lost]"))
    assert [device.total // MIB for device in devices(nvidia, tmp_path)] == [0, 49152, 8192]
    seen = [(DeviceMemory(100, 50), DeviceMemory(200, 60)), (DeviceMemory(100, 50),)]
    probe = MemoryProbe(7, 0, root=tmp_path, look=lambda: seen.pop(0))
    assert probe().vram == (50, 60)
    probe.refresh({})
    assert probe().vram == (50, 0)


def test_a_driver_that_cannot_be_ended_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\nexec sleep {HUNG}\n")
    program.chmod(0o755)
    monkeypatch.setattr("modelrunner.scheduler.devices._TIMEOUT", 0.5)
    monkeypatch.setattr("subprocess.Popen.kill", lambda process: None)  # it waits for the device, and no signal helps
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for expected in ("within 0.5 s", "cannot be ended"):
        with pytest.raises(TimeoutError, match=expected):
            devices(environ, tmp_path)
    assert (tmp_path / "asked").read_text().split() == ["asked"]
    monkeypatch.undo()
    for process in hung_queries:
        process.kill()
        process.communicate()
    hung_queries.clear()
