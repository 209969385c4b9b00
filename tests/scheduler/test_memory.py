import os
import resource
from pathlib import Path

import psutil
import pytest

from modelrunner.scheduler import MemoryProbe
from modelrunner.scheduler.memory import control_group_limits, private_bytes
from modelrunner.types import RequiredMemory

GIB = 1 << 30


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return root


def test_a_fixed_budget_is_what_it_says() -> None:
    assert MemoryProbe(8 * GIB)() == RequiredMemory(8 * GIB)
    assert MemoryProbe(0)() == RequiredMemory(0)


def test_by_default_it_is_what_is_free_less_a_tenth(tmp_path: Path) -> None:
    machine = psutil.virtual_memory()
    expected = machine.available - machine.total // 10
    assert MemoryProbe(root=tmp_path)().ram == pytest.approx(max(0, expected), abs=GIB)
    assert MemoryProbe(reserve=0, root=tmp_path)().ram == pytest.approx(machine.available, abs=GIB)
    assert MemoryProbe(reserve=1 << 60, root=tmp_path)().ram == 0


def test_what_our_own_processes_hold_counts_as_ours(tmp_path: Path) -> None:
    own = private_bytes(os.getpid())
    assert own > 1 << 20
    probe = MemoryProbe(reserve=0, root=tmp_path)
    without = probe().ram
    probe.refresh({os.getpid(): RequiredMemory(0)})
    assert probe().ram - without == pytest.approx(own, abs=GIB // 4)


def test_a_process_that_is_gone_holds_nothing() -> None:
    assert private_bytes(1 << 22 | 1) == 0


VERSION_2 = {
    "proc/self/cgroup": "0::/user.slice/box",
    "sys/fs/cgroup/user.slice/box/memory.max": "max",
    "sys/fs/cgroup/user.slice/box/memory.current": "5000",
    "sys/fs/cgroup/user.slice/memory.max": "100000",
    "sys/fs/cgroup/user.slice/memory.current": "60000",
    "sys/fs/cgroup/user.slice/memory.stat": "anon 30000\ninactive_file 20000\nactive_file 10000",
}
VERSION_1 = {
    "proc/self/cgroup": "12:cpu,cpuacct:/box\n4:memory:/box\n0::/",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "100000",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "60000",
    "sys/fs/cgroup/memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 20000\ntotal_active_file 10000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "90000",
}
IN_A_CONTAINER = {
    "proc/self/cgroup": "0::/docker/0123",
    "sys/fs/cgroup/memory.max": "100000",
    "sys/fs/cgroup/memory.current": "30000",
}
SLOWED_DOWN = {
    "proc/self/cgroup": "0::/user.slice/box",
    "sys/fs/cgroup/user.slice/box/memory.max": "200000",
    "sys/fs/cgroup/user.slice/box/memory.high": "100000",
    "sys/fs/cgroup/user.slice/box/memory.current": "30000",
    "sys/fs/cgroup/user.slice/memory.max": "max",
    "sys/fs/cgroup/user.slice/memory.high": "max",
    "sys/fs/cgroup/user.slice/memory.current": "90000",
}
NESTED = {
    "proc/self/cgroup": "0::/a/b",
    **{f"sys/fs/cgroup/a/memory.{name}": text for name, text in {"max": "100000", "current": "30000"}.items()},
    **{f"sys/fs/cgroup/a/b/memory.{name}": text for name, text in {"max": "max", "current": "20000"}.items()},
}


@pytest.mark.parametrize(
    "files",
    [VERSION_2, VERSION_1, IN_A_CONTAINER, SLOWED_DOWN, NESTED],
    ids=["v2", "v1", "container", "high", "nested"],
)
def test_the_limits_of_control_groups_count(files: dict[str, str], tmp_path: Path) -> None:
    root = lay(tmp_path, files)
    assert control_group_limits(root) == [(100000, 30000)]
    assert MemoryProbe(root=root)() == RequiredMemory(60000)
    assert MemoryProbe(reserve=0, root=root)() == RequiredMemory(70000)


def test_the_tightest_level_counts(tmp_path: Path) -> None:
    """The inner group has the smaller limit, the outer one less left."""
    inner = {"sys/fs/cgroup/a/b/memory.max": "90000", "sys/fs/cgroup/a/memory.current": "95000"}
    root = lay(tmp_path, NESTED | inner)
    assert control_group_limits(root) == [(90000, 20000), (100000, 95000)]
    assert MemoryProbe(reserve=0, root=root)() == RequiredMemory(5000)
    assert MemoryProbe(reserve=1000, root=root)() == RequiredMemory(4000)


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert control_group_limits(lay(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"})) == []
    assert control_group_limits(tmp_path / "nowhere") == []


def test_the_limit_of_an_address_space_is_one(tmp_path: Path) -> None:
    """Every engine inherits it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + GIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        assert MemoryProbe(reserve=0, root=tmp_path)().ram <= limit
        assert MemoryProbe(root=tmp_path)().ram <= limit - limit // 10
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
