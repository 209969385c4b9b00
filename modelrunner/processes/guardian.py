"""Keeps one engine, and lets none of its processes outlive the daemon. process.py starts this script as
`python -I -S guardian.py FD`. It imports nothing of modelrunner, so that it starts in milliseconds and stays small.

FD is one end of a stream socket. The daemon sends the command line (8 bytes of length, then a marshalled tuple of
argument list, environment, confinement, mark and stop signal), later single bytes: T asks the engine's process group
to end, K kills everything. The end of the stream means that the daemon is gone, and counts as K. The guardian answers
in lines: `started PID`; `failed ERRNO` if the program could not be executed, `unconfined ERRNO` if it could not be
confined; then `exited CODE`, negative for a signal. Its own end says that every process which the engine started has
been killed and reaped.

On Linux it is a subreaper: descendants that leave the session or the process group become its children when their
parents end, and are found (prctl(2), PR_SET_CHILD_SUBREAPER). If the guardian itself is killed, the kernel kills
the engine (PR_SET_PDEATHSIG), and the daemon, which is a subreaper, too, kills the rest. On other systems the guardian
knows only the process group.
"""

import ctypes
import errno
import marshal
import os
import resource
import select
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any
else:
    import _signal as signal  # the enums of signal itself would take a fifth of the guardian's start

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # the same on every processor
RULE_PATH_BENEATH, RULE_NET_PORT = 1, 2
RLIMIT_LOCKS = 10  # getrlimit(2): no kernel since 2.4.25 looks at it
RIGHTS_ON_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # LANDLOCK_ACCESS_FS_* that a file itself may have
LINUX = sys.platform == "linux"
ENGINE_OOM_SCORE = b"500"  # when memory runs out, the kernel takes an engine before the daemon
SWEEP_INTERVAL = 0.02


def main(control: int) -> None:
    os.set_inheritable(control, False)
    # The daemon decides when an engine ends; a TERM for the whole service must not end its guardian first.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ended, wakeup = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wakeup, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(PR_SET_CHILD_SUBREAPER, 1)

    order = receive_order(control)
    if order is None:
        return
    *command, stop_signal = order
    engine, failure = start(*command)
    if failure:
        report(control, failure)
        return
    report(control, f"started {engine}")
    status = watch(control, ended, engine, stop_signal)
    kill_group(engine, signal.SIGKILL)
    if status is None:
        kill(engine)  # it may be in another group than its children
        status = os.waitpid(engine, 0)[1]
    report(control, f"exited {os.waitstatus_to_exitcode(status)}")
    sweep(ended)


def prctl(option: int, value: int, pointer: object = 0) -> None:
    if LINUX and ctypes.CDLL(None, use_errno=True).prctl(option, value, pointer, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) was refused")


def receive_order(control: int) -> "tuple[Any, ...] | None":
    """Returns the command line, environment, confinement, mark and stop signal, or None if the daemon is gone."""
    header = receive(control, 8)
    body = header and receive(control, int.from_bytes(header, "big"))
    return marshal.loads(body) if body else None


def receive(control: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        chunk = read(control, size - len(data))
        if not chunk:
            return None
        data += chunk
    return data


def read(control: int, size: int) -> bytes:
    try:
        return os.read(control, size)
    except ConnectionError:
        return b""


def report(control: int, line: str) -> None:
    try:  # noqa: SIM105 - contextlib would be the slowest of the imports
        os.write(control, line.encode() + b"\n")
    except ConnectionError:
        pass  # the daemon is gone; the sweep still has to run


def start(
    argv: list[bytes], env: dict[bytes, bytes], confinement: "tuple[Any, ...] | None", mark: int
) -> tuple[int, str]:
    """Starts the engine. Returns its process ID, and the report of a failure or ""."""
    reader, writer = os.pipe()  # closed by a successful exec
    guardian = os.getpid()
    pid = os.fork()
    if pid == 0:
        become_engine(argv, env, confinement, mark, writer, guardian)
    os.close(writer)
    failure = os.read(reader, 32).decode()
    os.close(reader)
    if failure:
        os.waitpid(pid, 0)
    return pid, failure


def become_engine(
    argv: list[bytes],
    env: dict[bytes, bytes],
    confinement: "tuple[Any, ...] | None",
    mark: int,
    writer: int,
    guardian: int,
) -> None:
    step = "failed"
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)
        os.setpgid(0, 0)
        for number in signal.valid_signals():
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        raise_oom_score()
        set_mark(mark)
        if confinement is not None:
            step = "unconfined"
            confine(*confinement)
            step = "failed"
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(writer, f"{step} {error.errno or errno.EPERM}".encode())
    except ValueError:  # a NUL in an argument or a variable
        os.write(writer, f"{step} {errno.EINVAL}".encode())
    finally:
        os._exit(127)


def confine(
    limits: list[tuple[int, int]],
    capabilities: list[int] | None,
    ruleset: bytes,
    rules: list[tuple[bytes, int]],
    ports: list[tuple[int, int, int]],
    system_calls: bytes,
) -> None:
    """Applies the decisions of confinement.py: resource `limits`; the `capabilities` that root keeps, None for another
    user; the `ruleset`, a `struct landlock_ruleset_attr`, with the rights on paths (`rules`) and on `ports`, from one
    to another; and `system_calls`, an array of `struct sock_filter`."""
    for number, most in limits:
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(number, (most, most))
    if capabilities is not None:
        with open("/proc/sys/kernel/cap_last_cap", "rb") as last:
            every = range(int(last.read()) + 1)
        for capability in set(every).difference(capabilities):
            prctl(PR_CAPBSET_DROP, capability)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if ruleset:
        landlock(ruleset, rules, ports)
    if system_calls:
        program = FilterProgram(len(system_calls) // 8, system_calls)
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))


class FilterProgram(ctypes.Structure):
    """The kernel's `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def landlock(ruleset: bytes, rules: list[tuple[bytes, int]], ports: list[tuple[int, int, int]]) -> None:
    descriptor = system_call(LANDLOCK_CREATE_RULESET, ruleset, len(ruleset), 0)
    for path, rights in rules:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # this machine has no such file
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= RIGHTS_ON_FILES
        rule = rights.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
        system_call(LANDLOCK_ADD_RULE, descriptor, RULE_PATH_BENEATH, rule, 0)
        os.close(place)
    add = ctypes.CDLL(None, use_errno=True).syscall  # for most of the ports, where one is closed
    for rights, first, last in ports:
        granted = rights.to_bytes(8, sys.byteorder)
        for port in range(first, last + 1):
            if add(LANDLOCK_ADD_RULE, descriptor, RULE_NET_PORT, granted + port.to_bytes(8, sys.byteorder), 0) < 0:
                raise OSError(ctypes.get_errno(), "a rule on a port was refused")
    system_call(LANDLOCK_RESTRICT_SELF, descriptor, 0)
    os.close(descriptor)


def system_call(number: int, *arguments: object) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number} was refused")
    return result


def raise_oom_score() -> None:
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as score:
            score.write(ENGINE_OOM_SCORE)
    except OSError:
        pass  # no /proc, or one that is read-only: the engine runs without it


def set_mark(mark: int) -> None:
    """Gives the engine and all its descendants a limit that tells their daemon, and that nobody can raise."""
    try:
        if LINUX:
            resource.setrlimit(RLIMIT_LOCKS, (mark, mark))
    except ValueError:
        pass  # a lower limit was set around the daemon: the environment alone tells


def watch(control: int, ended: int, engine: int, stop_signal: int) -> int | None:
    """Waits and obeys the daemon, which asks the engine to end by `stop_signal`. Returns the engine's wait status when
    it has ended, None when it has to be killed."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(ended, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll()]
        if ended in ready:
            os.read(ended, 4096)
            status = reap(engine)
            if status is not None:
                return status
        if control in ready:
            if read(control, 1) != b"T":
                return None
            kill_group(engine, stop_signal)
            kill_group(engine, signal.SIGCONT)  # a stopped process would not get it


def reap(engine: int) -> int | None:
    """Reaps all ended processes, including adopted ones. Returns the engine's wait status if it was among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == engine:
            status = ended


def kill_group(engine: int, number: int) -> None:
    """Also signals the engine itself where it has left its group. It is our child, so its ID is not used again before
    we have reaped it."""
    try:
        os.killpg(engine, number)
    except (ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
        kill(engine, number)


def sweep(ended: int) -> None:
    """Kills children until there are none. After each death we adopt the children of the dead. A process that has
    become another user's cannot be killed, and is given up."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            killed = [child for child in children() if kill(child)]
            if not killed:
                return
            if select.select([ended], [], [], SWEEP_INTERVAL)[0]:
                os.read(ended, 4096)


def kill(child: int, number: int = signal.SIGKILL) -> bool:
    try:
        os.kill(child, number)
    except (PermissionError, ProcessLookupError):
        return False
    return True


def children() -> list[int]:
    """Returns the process IDs of our children. An ID cannot be reused before we have reaped its process."""
    try:  # from the kernel, which is faster than a chain of processes that replace themselves
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as stream:
            return [int(pid) for pid in stream.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and is_child(name)] if LINUX else []


def is_child(name: str) -> bool:
    try:
        with open(f"/proc/{name}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid()
    except (FileNotFoundError, ProcessLookupError):
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)
