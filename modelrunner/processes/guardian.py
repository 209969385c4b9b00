"""Keeps one engine, and lets nothing of it outlive the daemon. A script of its own, started by process.py as
`python -I -S guardian.py FD`. It imports nothing of modelrunner, so that it starts in milliseconds and stays small.

FD is one end of a stream socket. The daemon sends the command line (8 bytes of length, then a marshalled pair of
argument list and environment), later single bytes: T asks the engine's process group to end, K kills everything. The
end of the stream means that the daemon is gone, and counts as K. The guardian answers in lines: `started PID`, or
`failed ERRNO` if the program could not be executed; then `exited CODE`, negative for a signal. Its own end says that
every process which the engine started has been killed and reaped.

On Linux it is a subreaper: descendants that leave the session or the process group become its children when their
parents end, and are found (prctl(2), PR_SET_CHILD_SUBREAPER). Should the guardian itself be killed, the kernel kills
the engine (PR_SET_PDEATHSIG), and the daemon, a subreaper too, kills the rest. Elsewhere the process group is all there
is.
"""

import ctypes
import errno
import marshal
import os
import resource
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
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
    engine, failure = start(*order)
    if failure:
        report(control, f"failed {failure}")
        return
    report(control, f"started {engine}")
    status = watch(control, ended, engine)
    kill_group(engine, signal.SIGKILL)
    if status is None:
        status = os.waitpid(engine, 0)[1]
    report(control, f"exited {os.waitstatus_to_exitcode(status)}")
    sweep(ended)


def prctl(option: int, value: int) -> None:
    if LINUX and ctypes.CDLL(None).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(f"prctl({option}) was refused")


def receive_order(control: int) -> tuple[list[bytes], dict[bytes, bytes]] | None:
    """Returns the command line and environment, or None if the daemon is gone."""
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


def start(argv: list[bytes], env: dict[bytes, bytes]) -> tuple[int, int]:
    """Starts the engine. Returns its process ID, and 0 or the errno if it could not be executed."""
    reader, writer = os.pipe()  # closed by a successful exec
    guardian = os.getpid()
    pid = os.fork()
    if pid == 0:
        become_engine(argv, env, writer, guardian)
    os.close(writer)
    failure = os.read(reader, 16)
    os.close(reader)
    if failure:
        os.waitpid(pid, 0)
    return pid, int(failure or 0)


def become_engine(argv: list[bytes], env: dict[bytes, bytes], writer: int, guardian: int) -> None:
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)
        os.setpgid(0, 0)
        for number in signal.valid_signals():
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        raise_oom_score()
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(writer, str(error.errno or errno.EPERM).encode())
    except ValueError:  # a NUL in an argument or a variable
        os.write(writer, str(errno.EINVAL).encode())
    finally:
        os._exit(127)


def raise_oom_score() -> None:
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as score:
            score.write(ENGINE_OOM_SCORE)
    except OSError:
        pass  # no /proc, or one that is read-only: the engine runs without it


def watch(control: int, ended: int, engine: int) -> int | None:
    """Waits and obeys the daemon until the engine has ended (returns its wait status) or has to be killed (returns
    None)."""
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
            kill_group(engine, signal.SIGTERM)
            kill_group(engine, signal.SIGCONT)  # a stopped process would not get the TERM


def reap(engine: int) -> int | None:
    """Reaps all ended processes, including adopted ones; returns the engine's wait status if it was among them."""
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
    try:  # noqa: SIM105
        os.killpg(engine, number)
    except (ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
        pass


def sweep(ended: int) -> None:
    """Kills children until there are none: after each death we adopt its children. A process that has become another
    user's cannot be killed, and is given up."""
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


def kill(child: int) -> bool:
    try:
        os.kill(child, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def children() -> list[int]:
    """Returns process IDs of our children; they cannot be reused before we have reaped them."""
    try:  # from the kernel, which is faster than a chain of processes that replace themselves
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as found:
            return [int(pid) for pid in found.read().split()]
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
