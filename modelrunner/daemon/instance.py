"""The daemon's lock of the data directory, its listening sockets and its signals, and the clean-up after a killed
daemon."""

import asyncio
import errno
import fcntl
import ipaddress
import logging
import os
import re
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from modelrunner import durable
from modelrunner.concurrency.threads import Pool
from modelrunner.config import lockfile
from modelrunner.config.locations import MAX_SOCKET_PATH, ConfigurationError
from modelrunner.daemon import logs
from modelrunner.errors import ModelRunnerError
from modelrunner.processes.processtree import become_subreaper, sweep_orphans

log = logging.getLogger(__name__)

# Seconds; Python's own are 0.005. A thread gives the interpreter away with each system call, and waits this long to get
# it back from a busy loop: what looks at many files (`/version`) took 0.6 s beside a flood of requests, 0.25 with this.
_SWITCH_INTERVAL = 0.001
_HANDOVER = 10.0  # seconds that a new daemon waits for one that is starting or ending
_POLL = 0.05
_PROBE_TIMEOUT = 1.0
BACKLOG = 1024
"""Clients in the queue of a listener; a further client's system tries again after a second."""
_MOST_DESCRIPTORS = 1 << 16
_RUNTIME = re.compile(r"modelrunner-(\d+-)?[0-9a-f]{8}")
_RUNNER = re.compile(r"[0-9a-f]{8}")
Announce = Callable[[Path, str], None]
_FIRST = 3


class AlreadyRunning(ModelRunnerError):
    """Another daemon holds the data directory, or another program the address."""

    code = "already_running"


class Lifecycle:
    """The requests to stop, from signals and from `POST /shutdown`: the first one drains, the second one does not wait.
    `on_reload`, if set, reads the configuration again."""

    def __init__(self) -> None:
        self.on_reload: Callable[[], None] | None = None
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
        self.started = time.monotonic()
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    def request_stop(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()

    def hang_up(self) -> None:
        """Handles HUP. It asks a service to read its configuration again. A program in a terminal gets it when the
        terminal was closed: the system detaches the program from the terminal before it sends the signal."""
        closed = any(not os.isatty(descriptor) for descriptor in self._terminals)
        if closed or self.on_reload is None:
            self.request_stop()
        else:
            self.on_reload()

    @contextmanager
    def on_signals(self, *, last: bool = False) -> Iterator[None]:
        """Stops on TERM and INT (Ctrl-C). With `last` the process ends after the block, and ignores later signals, so
        that its exit status is its own."""
        loop = asyncio.get_running_loop()
        handlers: dict[int, Callable[[], None]] = {
            signal.SIGTERM: self.request_stop,
            signal.SIGINT: self.request_stop,
            signal.SIGHUP: self.hang_up,
        }

        def handle(number: int, _: object) -> None:
            loop.call_soon_threadsafe(handlers[number])  # few frames: a flood of signals nests them

        before = {number: signal.signal(number, handle) for number in handlers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if last else handler)


def prepare_process() -> None:
    """Prepares the process of the daemon. Occupies descriptors 0 to 2, so that none of our sockets or files becomes
    some library's stdout; raises the limit of descriptors; lets threads run while the event loop is busy; and adopts
    the processes of killed guardians."""
    become_subreaper()
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    sys.setswitchinterval(_SWITCH_INTERVAL)


@asynccontextmanager
async def opened(
    data: Path, socket_path: Path, log_level: str, runtime_folder: Callable[[], Path]
) -> AsyncIterator[Announce]:
    """Holds the data directory as `hold` does, logs to it, and removes what killed daemons left. Raises as `hold`."""
    folder = data / "logs"
    with hold(data, socket_path) as announce, logs.logging_to(folder, log_level):
        asyncio.get_running_loop().set_default_executor(Pool("files", 16, prompt=True))
        await asyncio.to_thread(sweep_orphans)
        runtime = runtime_folder()
        remove_dead_sockets(runtime)
        remove_abandoned(runtime)
        logs.prune_engine_logs(folder)
        yield announce


@contextmanager
def hold(data: Path, socket_path: Path) -> Iterator[Announce]:
    """Holds the lock of the data directory within the block; the lock ends with the process, however that ends. Waits
    for a daemon that is just starting or ending. Yields a function that writes the daemon's addresses (the path of its
    socket, and its TCP address or "") into the lock file. Raises `AlreadyRunning`, which names the holder, and
    `ConfigurationError`."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(data / lockfile.NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            os.close(lock)
            raise OSError(errno.EINVAL, f"{lockfile.NAME} is not a regular file")
    except OSError as error:
        raise ConfigurationError(
            f"the data directory {data} cannot be used: {error.strerror}; make it writable, or set another "
            "with MODELRUNNER_DATA_DIR"
        ) from error

    def announce(path: Path, listen: str) -> None:
        with suppress(OSError):  # a full disk: the earlier content is still there
            lockfile.write(lock, lockfile.Holder(os.getpid(), str(path), listen))

    try:
        _lock(lock, data)
        announce(socket_path, "")
        yield announce
        os.ftruncate(lock, 0)
    finally:
        os.close(lock)


def _lock(lock: int, data: Path) -> None:
    end = time.monotonic() + _HANDOVER
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = lockfile.read(lock)
            if time.monotonic() > end or (other and answers(Path(other.socket))):
                where = f"process {other.pid}, listening on unix://{other.socket}" if other else "another process"
                raise AlreadyRunning(
                    f"a daemon already serves {data}: {where}; stop it with `modelrunner shutdown`"
                ) from None
            time.sleep(_POLL)


def answers(path: Path) -> bool:
    """Returns whether a process listens on this Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT)
        try:
            probe.connect(os.fspath(path))
        except TimeoutError:
            return True  # its queue is full
        except OSError:
            return False
        return True


def remove_abandoned(runtime: Path) -> None:
    """Removes folders of dead daemons beside `runtime`: of the same kind and user, without a listener, and unchanged
    for a day. Their data directories may have been deleted."""
    yesterday = time.time() - 24 * 3600
    for folder in runtime.parent.glob("modelrunner-*"):
        with suppress(OSError):
            status = folder.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and _RUNTIME.fullmatch(folder.name)
            if ours and folder != runtime and status.st_mtime < yesterday:
                remove_dead_sockets(folder)
                folder.rmdir()
                log.info("removed %s, whose daemon is gone", folder)


def remove_dead_sockets(runtime: Path) -> None:
    """Removes the sockets of killed daemons, and the folders of their runners. A socket with a listener stays, and so
    does what cannot be removed: an engine may have made a folder that nobody may open."""
    for path in runtime.iterdir():
        with suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode) and not answers(path):
                path.unlink()
                log.info("removed %s, which has no listener any more", path)
            elif _RUNNER.fullmatch(path.name) and not any(map(answers, path.iterdir())):
                durable.discard(path)
                log.info("removed %s, whose runner is gone", path)


class UnixListener:
    """A listening socket of mode 0600, with a temporary name until it is published: so no client finds a socket that
    does not answer. asyncio removes files at paths that it binds, so it never gets the path."""

    def __init__(self, path: Path, ready: socket.socket | None = None) -> None:
        """Takes `ready`, a socket that listens on `path` and whose files are another's (a service manager's). Raises
        `AlreadyRunning` if another program listens on `path`, `ConfigurationError` if no socket can be made."""
        self._path = path
        self._own = ready is None
        if ready is not None:
            self.socket = ready
            self._identity = path.lstat()
            return
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ConfigurationError(
                f"the socket path {path} is longer than {MAX_SOCKET_PATH} bytes: set a shorter one with "
                "MODELRUNNER_RUNTIME_DIR or --socket"
            )
        if answers(path):
            raise AlreadyRunning(f"another program listens on {path}: stop it, or set another `socket`")
        if os.path.lexists(path) and not path.is_socket():
            raise ConfigurationError(f"{path} is in the way and is no socket: move it, or set another `socket`")
        self._temporary = path.with_name(f".{os.getpid()}.sock")
        self.socket = socket.socket(socket.AF_UNIX)
        mask = os.umask(0o177)  # the mode is right from the first moment
        try:
            self._temporary.unlink(missing_ok=True)
            self.socket.bind(os.fspath(self._temporary))
        except OSError as error:
            self.socket.close()
            raise ConfigurationError(
                f"no socket can be made at {path}: {error.strerror or error}; set another place with "
                "MODELRUNNER_RUNTIME_DIR or --socket"
            ) from error
        finally:
            os.umask(mask)
        self._identity = self._temporary.lstat()

    def publish(self) -> None:
        """Gives the socket its name. Call it once the socket listens."""
        if self._own:
            self._temporary.rename(self._path)

    def is_published(self) -> bool:
        """Returns False once the name was removed, or belongs to another socket."""
        try:
            return os.path.samestat(self._path.lstat(), self._identity)
        except OSError:
            return False

    def close(self) -> None:
        """Closes the socket and removes it, unless its name belongs to another socket by then."""
        self.socket.close()
        for path in (self._temporary, self._path) if self._own else ():
            with suppress(FileNotFoundError, NotADirectoryError):
                if os.path.samestat(path.lstat(), self._identity):
                    path.unlink()


def bind_tcp(listen: str, *, beyond_loopback: bool = False) -> socket.socket | None:
    """Makes a listener for an address such as `127.0.0.1:12434` or `[::1]:0`; None for "". Raises `ConfigurationError`
    for an address that is not loopback unless that is allowed, `AlreadyRunning` for a port that is taken."""
    if not listen:
        return None
    host, port = _parse_address(listen, beyond_loopback)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Not later, in the event loop: with SO_REUSEADDR two programs may bind, but only one can listen.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AlreadyRunning(
                f"another program listens on {listen}: stop it, or set another address with --listen or "
                "MODELRUNNER_LISTEN (empty for none)"
            ) from None
        raise ConfigurationError(f"listen = {listen!r} cannot be used: {error.strerror or error}") from error
    return listener


def address(listener: socket.socket | None, *, tls: bool = False) -> str:
    """Returns the address in a client's form, `http://127.0.0.1:12434`; "" without a listener."""
    if listener is None:
        return ""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _parse_address(listen: str, beyond_loopback: bool) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"listen = {listen!r} is no address: write HOST:PORT such as 127.0.0.1:12434")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ConfigurationError(f"listen = {listen!r}: {host!r} is no IP address, and not localhost") from None
    if not (address.is_loopback or beyond_loopback):
        raise ConfigurationError(
            f"listen = {listen!r} would open the daemon to others, and there is no API key yet: start it on 127.0.0.1, "
            "make one with `modelrunner keys create NAME`, then set this address again"
        )
    return str(address), int(port)


def handed_over(environ: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """Takes the Unix socket from LISTEN_FDS (systemd: sd_listen_fds(3)), once, so that engines do not get it; closes
    other sockets. None where LISTEN_PID is not this process."""
    count, pid = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_PID", "")
    environ.pop("LISTEN_FDNAMES", None)
    if not count.isdecimal() or pid != str(os.getpid()):
        return None
    listener = None
    for descriptor in range(_FIRST, _FIRST + int(count)):
        each = socket.socket(fileno=descriptor)
        if listener is None and each.family == socket.AF_UNIX:
            each.set_inheritable(False)
            listener = each
        else:
            each.close()
    return listener
