"""Decides what an engine may do: makes the order that the guardian carries out between fork and exec, and the report of
what holds. docs/sandbox.md says what is in it and why.

Landlock (Linux, Documentation/userspace-api/landlock.rst) holds files, TCP, signals and tracing, as far as the kernel's
version of it goes; the filter of seccomp.py holds the rest. Nothing here needs privileges."""

import ctypes
import os
import resource
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from modelrunner.processes import seccomp
from modelrunner.sandbox import Permissions, Sandbox

_CREATE_RULESET, _VERSION = 444, 1  # landlock_create_ruleset(2), LANDLOCK_CREATE_RULESET_VERSION

# LANDLOCK_ACCESS_FS_*, _NET_* and LANDLOCK_SCOPE_* (linux/landlock.h), with the ABI that has them.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE = 1 << 4 | 1 << 5  # of folders and files
_MAKE_DEVICES = 1 << 6 | 1 << 11
_MAKE = 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 12  # folders, files, sockets, pipes, symbolic links
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15  # ABI 2, 3, 5
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1  # ABI 4
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1  # ABI 6

_READ = _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _TRUNCATE | _REMOVE | _MAKE | _REFER
_DEVICE = _READ_FILE | _WRITE_FILE | _IOCTL_DEVICE
_SINCE = {2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEVICE}
_TRUNCATE_ABI, _TCP_ABI, _SCOPE_ABI = 3, 4, 6
_LAST_PORT = 65535

_PROGRAMS = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/nix/store", "/gnu/store"),
    *("/home/linuxbrew/.linuxbrew", "/run/opengl-driver"),
)
_SYSTEM = (
    *("/proc", "/sys/devices", "/sys/bus", "/sys/class", "/sys/module", "/sys/fs/cgroup", "/sys/kernel/mm"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/hosts", "/etc/host.conf", "/etc/os-release"),
    *("/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf", "/etc/OpenCL", "/etc/vulkan", "/etc/glvnd"),
)
_DEVICES = (
    *("null", "zero", "full", "random", "urandom"),
    *("nvidia*", "nvidia-caps/*", "dri/*", "kfd", "accel/*", "dxg"),
)
# Where it is, each process that uses CUDA writes the names of its threads to /proc/PID/task/TID/comm, which it opens
# with O_TRUNC: NVIDIA's driver (570 and later) gives up with error 304, "OS call failed", if that is refused.
_NVIDIA = "nvidiactl"

_MOST_PROCESSES = 16384  # of the user, threads included: the engines' threads and everything else of theirs
_MOST_FILES = 65536
_DAC_OVERRIDE, _IPC_LOCK = 1, 14  # what an engine of root's keeps: others' files (as Landlock allows), locked memory


_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
_HELD_FOR_NONE = (
    "held for no engine: abstract Unix sockets that it binds, memory that it executes as a file (memfd), the space "
    "that it takes in folders which its backend names"
)
_NO_FILTER = "this kernel or processor has no filter of system calls"


@dataclass(frozen=True, slots=True)
class Confinement:
    """`order` is what the guardian applies (guardian.py, `confine`), None for nothing; `sandbox` reports it. `env` is
    the engine's environment, with a folder for temporary files that the engine may write."""

    order: Any
    env: dict[str, str]
    sandbox: Sandbox


def confined(
    program: str, env: Mapping[str, str], permissions: Permissions, devices: Path = Path("/dev")
) -> Confinement:
    """`program` is looked up in `env`'s PATH. `devices` is the folder of device files."""
    if sys.platform != "linux":
        gap = "nothing is held: engines are confined on Linux only"
        return Confinement(None, dict(env), Sandbox(gaps=(gap,)))
    permissions |= Permissions(affinity=_binding(env))
    abi = landlock_abi()
    filters = seccomp.supported()
    kept = [_DAC_OVERRIDE, _IPC_LOCK] if os.geteuid() == 0 else None
    limits = [
        (resource.RLIMIT_NPROC, _MOST_PROCESSES),
        (resource.RLIMIT_NOFILE, _MOST_FILES),
        (resource.RLIMIT_CORE, 0),
    ]
    system_calls = (
        seccomp.program(
            listens_on_tcp=permissions.port is not None,
            network=bool(permissions.network),
            processes=bool(permissions.processes),
            affinity=bool(permissions.affinity),
            scheduling=bool(permissions.scheduling),
        )
        if filters
        else b""
    )
    cuda = (devices / _NVIDIA).exists()
    rules = _rules(program, env, permissions, abi, devices, cuda) if abi else []
    order = (limits, kept, _ruleset(permissions, abi) if abi else b"", rules, _ports(permissions, abi), system_calls)
    return Confinement(order, _with_temporary_folder(env, permissions), _report(permissions, abi, filters, cuda))


def capability() -> str:
    """Describes the means of this machine, and what they hold for no engine: "Landlock 7, seccomp; held for no engine:
    ..."."""
    means = [f"Landlock {landlock_abi()}"] if landlock_abi() else []
    means += ["seccomp"] if seccomp.supported() else []
    return f"{', '.join(means) or 'this machine has neither Landlock nor seccomp'}; {_HELD_FOR_NONE}"


@cache
def landlock_abi() -> int:
    """Returns the version of Landlock that the kernel has, 0 without it."""
    if sys.platform != "linux":
        return 0
    version: int = ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    return max(0, version)


def _known(abi: int) -> int:
    """The rights on files that this version knows."""
    known = _EXECUTE | _WRITE_FILE | _READ | _REMOVE | _MAKE | _MAKE_DEVICES
    return known | sum(right for since, right in _SINCE.items() if abi >= since)


def _ruleset(permissions: Permissions, abi: int) -> bytes:
    """Returns `struct landlock_ruleset_attr`, as long as this version has it."""
    tcp = _BIND_TCP | _CONNECT_TCP if not permissions.network or permissions.private_port is not None else 0
    scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS
    fields = [_known(abi), *([tcp] if abi >= _TCP_ABI else []), *([scopes] if abi >= _SCOPE_ABI else [])]
    return struct.pack(f"={len(fields)}Q", *fields)


def _ports(permissions: Permissions, abi: int) -> list[tuple[int, int, int]]:
    """Returns triples of rights, the first and the last TCP port that have them. Landlock grants ports, so closing one
    takes a rule for each of the others: a fifth of a second at the start, and 4 MB in the kernel."""
    if abi < _TCP_ABI:
        return []
    if permissions.network:
        if (closed := permissions.private_port) is None:
            return []
        both = _BIND_TCP | _CONNECT_TCP
        return [(both, 0, closed - 1), (both, closed + 1, _LAST_PORT)]
    return [(_BIND_TCP, permissions.port, permissions.port)] if permissions.port is not None else []


def _rules(
    program: str, env: Mapping[str, str], permissions: Permissions, abi: int, devices: Path, cuda: bool
) -> list[tuple[bytes, int]]:
    """Returns pairs of a path and rights. A path that does not exist is no fault: the guardian skips it. It looks each
    path up in the engine's process, so that /proc/self is the engine's."""
    reads = _narrowed((*_program_files(program, env), *permissions.reads), _closed(permissions))
    rights: list[tuple[str | Path, int]] = [(path, _READ | _EXECUTE) for path in (*map(Path, _PROGRAMS), *reads)]
    rights += [(path, _READ) for path in _SYSTEM]
    rights += [(path, _WRITE) for path in permissions.writes]
    rights += [(path, _DEVICE) for pattern in _DEVICES for path in devices.glob(pattern)]
    if cuda:  # a process that the engine starts has a folder of its own, which no rule can name before
        rights.append(("/proc" if permissions.processes else "/proc/self/task", _READ | _WRITE_FILE | _TRUNCATE))
    known = _known(abi)
    return [(os.fsencode(path), right & known) for path, right in rights]


def _closed(permissions: Permissions) -> list[Path]:
    """Returns the folders that no rule opens as a whole."""
    return [path.resolve() for path in (Path(os.path.expanduser("~")), *permissions.private)]


def _narrowed(paths: Iterable[Path], closed: Iterable[Path]) -> Iterable[Path]:
    """Yields `paths`; in place of a folder that is or encloses a closed one, the libraries in it and its folders of
    programs, libraries and headers."""
    for path in paths:
        if not _encloses(path, closed):
            yield path
        elif path.is_dir():
            yield from path.glob("*.so*")
            parts = (path / name for name in ("bin", "lib", "lib64", "include"))
            yield from (part for part in parts if not _encloses(part, closed))


def _encloses(path: Path, closed: Iterable[Path]) -> bool:
    folder = path.resolve()
    return any(place.is_relative_to(folder) for place in closed)


def _program_files(program: str, env: Mapping[str, str], scripts: int = 4) -> Iterable[Path]:
    """Yields the program, the folders with its libraries and headers (an engine may compile), for an interpreter of a
    virtual environment that and the same of the Python that it was made from, and for a script those of its
    interpreter."""
    if (place := shutil.which(program, path=env.get("PATH"))) is None:
        return
    if scripts and (interpreter := _interpreter(place)):  # Linux follows four
        yield from _program_files(interpreter, env, scripts - 1)
    paths = [Path(os.path.abspath(place)), Path(place).resolve()]
    if home := _home_of(paths[0].parent.parent):
        yield from (paths[0].parent.parent, paths[0].parent.parent / "pyvenv.cfg")
        paths.append(home / "python")
    for path in dict.fromkeys(paths):
        prefix = path.parent.parent
        yield from (path, path.parent, *(prefix / name for name in ("lib", "lib64", "include")))
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        yield from (Path(folder) for folder in env.get(name, "").split(os.pathsep) if os.path.isabs(folder))


def _interpreter(program: str) -> str | None:
    """Returns the program that the first line of a script names (execve(2)), without `env`; None for no script."""
    try:
        with open(program, "rb") as file:
            line = file.readline(256)
    except OSError:
        return None
    words = os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []
    words = words[1:] if words and Path(words[0]).name == "env" else words
    return words[0] if words else None


def _home_of(environment: Path) -> Path | None:
    """Returns the folder with the program of the Python that a virtual environment was made from, which a copied
    program does not show (`pyvenv.cfg`, PEP 405); None for another folder."""
    try:
        lines = (environment / "pyvenv.cfg").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    settings = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    return Path(settings["home"]) if os.path.isabs(settings.get("home", "")) else None


def _binding(env: Mapping[str, str]) -> str:
    """Returns the reason for `Permissions.affinity` where variables of OpenMP ask for it: GNU's library gives up if it
    cannot bind a thread."""
    names = [name for name in _BINDING_VARIABLES if env.get(name, "false").lower() != "false"]
    return f"{names[0]} binds threads to processors" if names else ""


def _with_temporary_folder(env: Mapping[str, str], permissions: Permissions) -> dict[str, str]:
    current = Path(env.get("TMPDIR") or tempfile.gettempdir())
    folders = [folder for folder in permissions.writes if not folder.is_relative_to("/dev")]
    if not folders or any(current.is_relative_to(folder) for folder in folders):
        return dict(env)
    return {**env, "TMPDIR": str(folders[0])}


def _report(permissions: Permissions, abi: int, filters: bool, cuda: bool) -> Sandbox:
    layers = ["no new privileges", "limits of processes, open files and core dumps"]
    layers += [f"Landlock {abi}"] if abi else []
    layers += ["seccomp"] if filters else []
    return Sandbox(tuple(layers), tuple(_gaps(permissions, abi, filters, cuda)))


def _gaps(permissions: Permissions, abi: int, filters: bool, cuda: bool) -> Iterable[str]:
    closed = _closed(permissions)
    if not abi:
        yield "files, tracing, signals: this kernel has no Landlock (Linux 5.13, and `landlock` in its list of `lsm`)"
    else:
        if abi < _TRUNCATE_ABI:
            yield "truncation of files: needs Landlock 3 (Linux 6.2)"
        for folder in (*map(Path, _PROGRAMS), *permissions.writes):
            yield from (f"files in {place}: it lies in {folder}" for place in closed if _encloses(folder, [place]))
        if cuda and permissions.processes and os.geteuid() == 0:
            yield "settings of the kernel in /proc: CUDA names threads there in each process, and the daemon is root"
        if abi < _SCOPE_ABI:
            yield "signals: need Landlock 6 (Linux 6.12)"
    if permissions.port is not None and not permissions.asks_for_key:
        yield f"requests of other users of this machine: TCP port {permissions.port} asks for no key"
    if permissions.network:
        is_held = permissions.private_port is None or (abi >= _TCP_ABI and filters)
        where = "" if is_held else ", also to the daemon's TCP port while there is no API key"
        yield f"connections{where}: {permissions.network}"
    else:
        if not filters:
            yield f"connections: {_NO_FILTER}"
        if permissions.port is not None and abi < _TCP_ABI:
            yield "listening on other ports: needs Landlock 4 (Linux 6.7)"
        elif permissions.port is not None:
            yield "listening on a port that the kernel chooses: listen(2) without bind(2) cannot be seen"
    if permissions.affinity:
        yield f"processors of other processes: {permissions.affinity}"
    if permissions.scheduling:
        yield f"other processes can lose their scheduling class: {permissions.scheduling}"
    if permissions.processes:
        limit = "without a limit, since the daemon is root" if os.geteuid() == 0 else "up to a limit"
        yield f"new processes, {limit}: {permissions.processes}"
        yield "new processes outlive a daemon and a guardian that are killed at once, until a daemon starts again"
    elif not filters:
        yield f"new processes: {_NO_FILTER}"
    if not filters:
        yield f"modes, owners and times of files; limits and priorities of other processes: {_NO_FILTER}"
