"""Looks at living processes: an engine's processes, their memory and activity, the listeners on a port; and kills the
processes that a killed daemon or guardian left. Every function scans the process table: milliseconds, tens of them on a
large machine."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from modelrunner.types import RequiredMemory

MARK = "MODELRUNNER_PROCESS"
_LOOPBACK_AND_ANY = {"127.0.0.1": ("127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"), "::1": ("::1", "::")}


def new_mark() -> str:
    """The value of `MARK` in an engine's environment, which its descendants inherit. It names this daemon, so that a
    later one can tell that they have lost theirs."""
    me = psutil.Process()
    return f"{_namespace(me.pid)}:{me.pid}:{me.create_time():.0f}:{os.urandom(8).hex()}"


def kill_marked(mark: str) -> int:
    """Sends KILL to every process that carries `mark`; returns how many there were."""
    return _kill(lambda found: found == mark)


def sweep_orphans() -> int:
    """Kills engines, and children of engines, whose daemon is gone, of this user and of any data directory: a daemon
    and its guardians may have been killed together. For the daemon's start. How many were found."""
    return _kill(_lost_its_daemon)


def _kill(chosen: Callable[[str], bool]) -> int:
    count = 0
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK)
            if mark is not None and process.status() != psutil.STATUS_ZOMBIE and chosen(mark):
                process.kill()
                count += 1
        except psutil.Error:  # it has ended, or is somebody else's
            continue
    return count


def _lost_its_daemon(mark: str) -> bool:
    """Returns False if that is unknown: process IDs mean something only inside their namespace."""
    try:
        namespace, pid, created, _ = mark.split(":")
        if namespace != _namespace(os.getpid()):
            return False
        return abs(psutil.Process(int(pid)).create_time() - float(created)) > 5
    except psutil.NoSuchProcess:
        return True
    except ValueError:
        return False


def _namespace(pid: int) -> str:
    try:
        return str(os.stat(f"/proc/{pid}/ns/pid").st_ino)
    except OSError:
        return "0"


def process_tree(pid: int) -> list[psutil.Process]:
    """Returns the engine `pid` and its descendants, including those that were handed to its guardian. Empty if the
    engine has ended."""
    try:
        engine = psutil.Process(pid)
        guardian = engine.parent()
        if guardian is not None and os.getsid(pid) == guardian.pid:
            return guardian.children(recursive=True)
        return [engine, *engine.children(recursive=True)]
    except (psutil.NoSuchProcess, ProcessLookupError):
        return []


def memory_of(pid: int) -> RequiredMemory:
    """Returns the main memory of the engine's processes: the memory that would be free without them, and the files that
    they map (`shared`). The processes of one engine share these files, and they count whole, whichever other process
    maps them."""
    found = [_memory(process) for process in process_tree(pid)]
    mapped = max((files for _, files in found), default=0)
    return RequiredMemory(sum(private for private, _ in found) + mapped, shared=mapped)


def _memory(process: psutil.Process) -> tuple[int, int]:
    """Returns bytes of the process's own, and of the files that it maps; nothing for a process that has ended."""
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
    """Linux, Documentation/filesystems/proc.rst: of memory that processes share, the proportional part. In `status`,
    the resident pages of files count whole."""
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
    """The totals of an engine: seconds of processor time, bytes read from disk."""

    cpu: float
    read: int

    def since(self, earlier: "Activity", seconds: float) -> bool:
        """Returns True if the engine worked: a fifth of a processor, or a mebibyte read. Answering our own polls takes
        far less."""
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
    """Returns the other processes that listen where a connection to `host`:`port` may arrive: process IDs outside the
    engine's tree (None for another user's process), usually none. Returns None instead of a list while the engine
    itself does not listen there."""
    ours = {process.pid for process in process_tree(pid)}
    listeners = [owner for address, owner in _listeners(ours, port) if address in _LOOPBACK_AND_ANY.get(host, (host,))]
    strangers = [owner for owner in listeners if owner not in ours]
    return strangers if listeners else None


def _listeners(ours: set[int], port: int) -> list[tuple[str, int | None]]:
    found: list[tuple[Any, int | None]]
    try:
        found = [(connection, connection.pid) for connection in psutil.net_connections("tcp")]
    except psutil.AccessDenied:  # macOS shows other processes' sockets to root only
        found = [(connection, pid) for pid in ours for connection in psutil.Process(pid).net_connections("tcp")]
    return [
        (connection.laddr.ip, pid)
        for connection, pid in found
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
