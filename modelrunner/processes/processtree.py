"""Inspects living processes: an engine's processes, their memory and activity, and the listeners on a port. It also
kills processes of killed daemons and guardians. Every function scans the process table, which takes milliseconds, or
tens of them on a large machine."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from modelrunner.types import RequiredMemory

MARK = "MODELRUNNER_PROCESS"
_LINUX = sys.platform == "linux"
_PR_SET_CHILD_SUBREAPER = 36
_PF_KTHREAD = 0x200000  # include/linux/sched.h
_LASTING, _START_BITS = 1 << 62, 40
_ROUNDS = 50
_LOOPBACK_AND_ANY = {"127.0.0.1": ("127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"), "::1": ("::1", "::")}


def new_mark() -> str:
    """Returns the value of `MARK` in an engine's environment, which its descendants inherit. It identifies this daemon,
    so that a later daemon recognises processes whose daemon is gone."""
    return f"{_identity(os.getpid())}:{os.urandom(8).hex()}"


def lasting_mark() -> int:
    """Returns the mark of this daemon that an engine cannot take off: guardian.py sets it as a limit without effect
    (RLIMIT_LOCKS), which every descendant inherits and the sandbox keeps. It holds the daemon's process ID and start
    (`_identity`); the boot and the namespace are those of whoever has it."""
    if not _LINUX:
        return 0
    *_, pid, start = _identity(os.getpid()).split(":")
    return _LASTING | int(pid) << _START_BITS | int(start)


def kill_marked(mark: str) -> int:
    """Sends KILL to every process that carries `mark`. Returns how many there were."""
    killed, _ = _kill(lambda other: other == mark, set())
    return killed


def become_subreaper() -> None:
    """Makes this process the parent of descendants whose own parents end (prctl(2), PR_SET_CHILD_SUBREAPER), so that
    `kill_adopted` finds the processes of a killed guardian. Does nothing outside Linux."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_adopted(own: Collection[int]) -> int:
    """Kills and reaps the descendants of killed guardians: children of this process in other sessions, except those in
    `own`. Returns how many were found and are not gone yet. It goes on while processes replace themselves."""
    for _ in range(_ROUNDS):
        adopted = [pid for pid in _children() if pid not in own and _is_adopted(pid)]
        if not sum(map(_killed, adopted)):
            return 0
    return len(adopted)


def _children() -> list[int]:
    """Returns the children of this process. The kernel keeps a list for each thread, and gives it to another thread
    when the thread ends, so the lists are read again if the threads have changed."""
    if not _LINUX:
        return []
    threads: list[str] = []
    lists: list[str] = []
    try:
        while threads != (now := os.listdir("/proc/self/task")):
            threads = now
            lists = [Path(f"/proc/self/task/{thread}/children").read_text("ascii") for thread in threads]
        return [int(pid) for pids in lists for pid in pids.split()]
    except OSError:  # a thread that has ended, or a kernel without CONFIG_PROC_CHILDREN
        return [child.pid for child in psutil.Process().children()]


def _is_adopted(pid: int) -> bool:
    try:
        return os.getsid(pid) != os.getsid(0)
    except ProcessLookupError:
        return False


def _killed(pid: int) -> bool:
    """Kills and reaps a process. Returns False if it belongs to another user, and cannot be killed."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        pass
    except PermissionError:
        return False
    return True


def sweep_orphans() -> int:
    """Kills engines and their children whose daemon is gone, of this user and of any data directory: a daemon and its
    guardians may have been killed together. The daemon calls it when it starts. Returns how many were found. It goes on
    while processes replace themselves: as long as some are killed, or end before they can be looked at."""
    count, ended = 0, set[int]()
    for _ in range(_ROUNDS):
        killed, missed = _kill(_lost_its_daemon, ended)
        count += killed
        if not killed and not missed:
            break
    return count


def _kill(chosen: Callable[[str], bool], ended: set[int]) -> tuple[int, int]:
    """Kills the processes with a chosen mark, and their groups: the kernel lets no child be born into a group that it
    kills. Returns how many were found, and how many ended before their marks were read. One that has ended and is not
    reaped, of which there may be thousands, counts the first time: it may have replaced itself just now. It comes into
    `ended` then, which is passed over, and so does a thread of the kernel."""
    killed = missed = 0
    for pid in sorted(psutil.pids(), reverse=True):  # the newest first, which may be about to replace itself
        if pid in ended:  # its number is not given again so soon
            continue
        try:
            is_of_the_kernel, has_ended = _state(pid)
            if is_of_the_kernel or has_ended:
                missed += has_ended
                ended.add(pid)
                continue
            process, group = psutil.Process(pid), os.getpgid(pid)
            if any(map(chosen, _marks(process))):
                if group != os.getpgrp():
                    os.killpg(group, signal.SIGKILL)
                if process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    killed += 1
        except psutil.ZombieProcess:
            missed += 1
            ended.add(pid)
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            missed += 1
        except (psutil.Error, OSError):  # it belongs to another user
            continue
    return killed, missed


def _state(pid: int) -> tuple[bool, bool]:
    """Returns whether a process is a thread of the kernel, which psutil reports as gone, and whether it has ended and
    is not reaped. Neither has an environment. Raises `FileNotFoundError` or `ProcessLookupError` for a process that is
    not there."""
    if not _LINUX:
        return False, False
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # proc(5): from the third on
    return int(fields[6]) & _PF_KTHREAD != 0, fields[0] in (b"Z", b"X")


def _marks(process: psutil.Process) -> list[str]:
    """Returns the mark in the environment of a process, which it can change, and one made of its lasting mark."""
    marks = []
    with suppress(psutil.AccessDenied):  # of ours, too, if it asked the kernel to hide its memory
        marks += [value for name, value in process.environ().items() if name == MARK]
    lasting = process.rlimit(psutil.RLIMIT_LOCKS)[1] if _LINUX else 0
    if lasting >> _START_BITS >= _LASTING >> _START_BITS:
        pid, start = divmod(lasting - _LASTING, 1 << _START_BITS)
        status = Path(f"/proc/{process.pid}/status").read_text("ascii", "replace")
        if len(status.partition("NSpid:")[2].partition("\n")[0].split()) == 1:  # the number means a process here
            boot, namespace, *_ = _identity(os.getpid()).split(":")
            marks.append(f"{boot}:{namespace}:{pid}:{start}:")
    return marks


def _lost_its_daemon(mark: str) -> bool:
    """Returns True if the daemon of this mark is gone, False if that is unknown: a process ID means something only in
    one namespace of one boot."""
    daemon, _, _ = mark.rpartition(":")
    try:
        boot, namespace, pid, _ = daemon.split(":")
        if [boot, namespace] != _identity(os.getpid()).split(":")[:2]:
            return False
        return _identity(int(pid)) != daemon
    except psutil.NoSuchProcess:
        return True
    except ValueError:  # not a mark of ours
        return False


def _identity(pid: int) -> str:
    """Identifies a process, regardless of changes of the clock: the boot's ID, the namespace of process IDs, the
    process ID, and its start in clock ticks since the boot (proc(5), field 22 of /proc/PID/stat). Outside Linux, the
    start is a time of day. Raises `psutil.NoSuchProcess`."""
    if not _LINUX:
        return f"::{pid}:{psutil.Process(pid).create_time():.0f}"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()  # from the third on
    except (FileNotFoundError, ProcessLookupError):
        fields = ["Z"]
    if fields[0] == "Z":  # it has ended, and its parent has not reaped it
        raise psutil.NoSuchProcess(pid)
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{pid}:{fields[19]}"


def process_tree(pid: int) -> list[psutil.Process]:
    """Returns the engine `pid` and its descendants, including those that its guardian adopted. The list is empty if the
    engine has ended."""
    try:
        engine = psutil.Process(pid)
        guardian = engine.parent()
        if guardian is not None and os.getsid(pid) == guardian.pid:
            return guardian.children(recursive=True)
        return [engine, *engine.children(recursive=True)]
    except (psutil.NoSuchProcess, ProcessLookupError):
        return []


def with_guardian(pid: int) -> tuple[int, ...]:
    """Returns the engine `pid` and its guardian, from which every process of the engine descends."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        guardian = psutil.Process(pid).parent()
        if guardian is not None and os.getsid(pid) == guardian.pid:
            return pid, guardian.pid
    return (pid,)


def descends_from(pid: int, ancestors: Collection[int]) -> bool | None:
    """Tells whether the process `pid` of ours is one of `ancestors`, or descends from one; None if it has ended. Where
    an ancestor ends meanwhile, and another process takes its children, the way up begins anew."""
    for _ in range(_ROUNDS):
        current = pid
        while current not in ancestors:
            if current in (0, 1, os.getpid()):
                return False
            try:
                with open(f"/proc/{current}/stat", "rb") as fields:  # proc(5): the fourth field
                    current = int(fields.read().rpartition(b")")[2].split()[1])
            except OSError:
                if _belongs_to_another(current):
                    return False
                if current == pid:
                    return None
                break
        else:
            return True
    return True  # a chain of processes that replace themselves


def _belongs_to_another(pid: int) -> bool:
    """True of another user's process, which /proc may hide."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        pass
    return False


def memory_of(pid: int) -> RequiredMemory:
    """Returns the main memory of the engine's processes: the memory that would be free without them, and the files that
    they map (`shared`). The processes of one engine share these files, which count in full even if other processes map
    them, too."""
    figures = [_memory(process) for process in process_tree(pid)]
    mapped = max((files for _, files in figures), default=0)
    return RequiredMemory(sum(private for private, _ in figures) + mapped, shared=mapped)


def private_memory(pid: int) -> int:
    """Returns the resident bytes of the process that are no pages of files, in a fraction of the time of `memory_of`; 0
    for a process that has ended, and where the kernel does not say."""
    try:
        return _kibibytes(f"/proc/{pid}/status", "RssAnon", "RssShmem")
    except OSError:
        return 0


def _memory(process: psutil.Process) -> tuple[int, int]:
    """Returns the process's private bytes, and those of the files that it maps; zeros for a process that has ended."""
    try:
        return _from_kernel(process.pid)
    except OSError:  # not Linux, or it has ended
        pass
    try:
        memory, resident = process.memory_full_info(), process.memory_info().rss
        return memory.uss, max(0, resident - memory.uss)
    except psutil.Error:
        return 0, 0


def _from_kernel(pid: int) -> tuple[int, int]:
    """Reads /proc (Linux, Documentation/filesystems/proc.rst): shared memory counts by its proportional part, resident
    pages of files in full."""
    own = _kibibytes(f"/proc/{pid}/smaps_rollup", "Pss_Anon", "Pss_Shmem")
    return own, _kibibytes(f"/proc/{pid}/status", "RssFile")


def _kibibytes(file: str, *names: str) -> int:
    """Returns the sum of these rows, in bytes."""
    with open(file, encoding="ascii", errors="replace") as rows:
        pairs = (row.split(":", 1) for row in rows if ":" in row)
        return sum(int(value.split()[0]) for name, value in pairs if name in names) << 10


def oom_kills() -> int:
    """Returns how many processes the kernel has killed since boot because the memory of a control group or of the
    machine ran out (Linux, /proc/vmstat); 0 if the kernel does not say."""
    try:
        with open("/proc/vmstat", "rb") as counters:
            return next((int(line.split()[1]) for line in counters if line.startswith(b"oom_kill ")), 0)
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class Activity:
    """The totals of an engine: `cpu` in seconds of processor time, and the bytes `read` from disk."""

    cpu: float
    read: int

    def since(self, earlier: "Activity", seconds: float) -> bool:
        """Returns True if the engine worked: a fifth of a processor, or a mebibyte read. Answering the daemon's polls
        takes far less."""
        return self.cpu - earlier.cpu >= 0.2 * seconds or self.read - earlier.read >= 1 << 20


def activity_of(pid: int) -> Activity:
    cpu, read = 0.0, 0
    for process in process_tree(pid):
        try:
            times = process.cpu_times()
            cpu += times.user + times.system
            if hasattr(process, "io_counters"):
                read += process.io_counters().read_bytes
        except psutil.Error:
            continue
    return Activity(cpu, read)


def strangers_on(pid: int, host: str, port: int) -> list[int | None] | None:
    """Returns the processes outside the tree of the engine `pid` that listen where a connection to `host`:`port` may
    arrive (None for another user's process), usually none. Returns None instead of a list while the engine itself does
    not listen.

    It checks twice if it finds some: an engine forks workers and opens sockets while its processes are listed."""
    strangers = _strangers_on(pid, host, port)
    if not strangers:
        return strangers
    again = _strangers_on(pid, host, port)
    return again and [owner for owner in again if owner in strangers]


def _strangers_on(pid: int, host: str, port: int) -> list[int | None] | None:
    addresses = _LOOPBACK_AND_ANY.get(host, (host,))
    listeners = [owner for address, owner in _listeners(pid, port) if address in addresses]
    ours = {process.pid for process in process_tree(pid)}  # after the listeners, so that it has their latest children
    return [owner for owner in listeners if owner not in ours] if listeners else None


def _listeners(engine: int, port: int) -> list[tuple[str, int | None]]:
    sockets: list[tuple[Any, int | None]]
    try:
        sockets = [(connection, connection.pid) for connection in psutil.net_connections("tcp")]
    except psutil.AccessDenied:  # macOS shows other processes' sockets to root only
        sockets = [(connection, own.pid) for own in process_tree(engine) for connection in own.net_connections("tcp")]
    return [
        (connection.laddr.ip, pid)
        for connection, pid in sockets
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
