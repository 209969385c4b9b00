"""Runs one child process as a coroutine, from its start until it is reaped. The coroutine ends by raising. Cancelling
it stops the process. When it has raised, none of its processes is left.

The child runs under a guardian (guardian.py), which kills all processes when the daemon dies. asyncio's own
subprocesses are not used: their wait hangs while a grandchild holds stdout, and their line reader fails on long
lines."""

import asyncio
import errno
import marshal
import os
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from fnmatch import translate
from functools import lru_cache
from itertools import chain, repeat
from pathlib import Path
from threading import Lock
from typing import NoReturn

from modelrunner.errors import BackendExited, BackendUnavailable, ModelRunnerError, Unavailable
from modelrunner.processes import peers, seccomp
from modelrunner.processes.confinement import Confinement, confined
from modelrunner.processes.log import EngineLog
from modelrunner.processes.processtree import MARK, kill_adopted, kill_marked, lasting_mark, new_mark
from modelrunner.sandbox import NO_PERMISSIONS, NOT_CONFINED, Permissions
from modelrunner.types import ProcessOptions

_GUARDIAN = Path(__file__).with_name("guardian.py")
_LOG_CHUNK = 64 << 10
# A flood is read at 32 MB/s at most, so that it costs other traffic little; the engine is slowed, never blocked.
_FLOOD_PAUSE = 0.002
_KILL_PATIENCE = 1.0
_FOR_PYTHON = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}

_guardians: set[int] = set()  # process IDs of all running guardians
_starting = Lock()  # held until a new guardian is in `_guardians`: several threads may start processes

_PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_*", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "HIP_*", "ROCR_*", "ROCM_*", "HSA_*", "GPU_DEVICE_ORDINAL"),
    *("ZE_*", "ONEAPI_*", "SYCL_*", "VK_*", "OMP_*", "KMP_*", "MKL_*"),
)
_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|(?:^|_)(?:KEYS?|PASS|AUTH)(?:_|$)|APIKEY", re.IGNORECASE)


def scrubbed_environment(keep: Iterable[str] = (), environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the part of `environ` for an engine: variables that find programs, libraries, languages and devices, and
    the names or patterns (`GGML_*`) in `keep`. A name that looks like a secret passes only if `keep` spells it out."""
    exact = frozenset(keep)
    passes = _pattern((*_PASSED_ON, *exact)).match
    return {
        name: value for name, value in environ.items() if passes(name) and (name in exact or not _SECRET.search(name))
    }


@lru_cache(maxsize=16)
def _pattern(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)))


async def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    options: ProcessOptions,
    cwd: Path | None = None,
    permissions: Permissions = NO_PERMISSIONS,
) -> NoReturn:
    """Runs `argv` until it ends or the caller is cancelled. The program is looked up in the PATH of `env`, gets exactly
    `env`, reads /dev/null, and writes to the log of `options`.

    If `options` has permissions, the program is confined to these and to `permissions`, and a `TMPDIR` that it could
    not write is replaced.

    A cancellation sends `options.stop_signal` to the process group, and KILL after `options.stop_grace` seconds; a
    second cancellation skips the rest of the grace.

    Raises `BackendExited` when the program ends, `CancelledError` when it was stopped, `BackendUnavailable` if it
    cannot be executed, `Unavailable` if this machine has no process or descriptor left. In each case every process
    that came from the program, in whatever session, is gone by then.
    """
    if options.permissions is None:
        confinement, connects = Confinement(None, dict(env), NOT_CONFINED), False
    else:
        permissions = options.permissions | permissions
        confinement = confined(argv[0], env, permissions)
        connects = confinement.order is not None and bool(permissions.network or not seccomp.supported())
    child = _Child(argv, confinement, options, cwd, connects)
    try:
        cancelled = not await child.wait(None)
        cancelled |= await child.end(options.stop_grace)
    finally:
        child.close()
    if cancelled:
        raise asyncio.CancelledError
    raise child.verdict()


class _Child:
    """The daemon's side of a guardian: its socket, the pipe with the engine's output, and the reports."""

    def __init__(
        self, argv: Sequence[str], confinement: Confinement, options: ProcessOptions, cwd: Path | None, connects: bool
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._program = argv[0]
        self._observer = options.observer
        self._connects = connects
        self._reports = b""
        self._sandbox = confinement.sandbox
        self._failure: tuple[str, int] | None = None
        self._returncode: int | None = None
        self._resume: asyncio.TimerHandle | None = None
        on_line = options.observer.output if options.observer else None
        self._log = EngineLog(options.log_path, options.log_limit, on_line)
        try:
            with ExitStack() as undo:
                undo.callback(self._log.close)
                self._mark = new_mark()
                self._spawn(undo, _order(argv, confinement, self._mark, options.stop_signal), cwd)
                undo.pop_all()
        except OSError as error:
            raise _start_error(self._program, "failed", error.errno or 0) from error
        self._loop.add_reader(self._control, self._read_reports)

    def _spawn(self, undo: ExitStack, order: bytes, cwd: Path | None) -> None:
        self._control, theirs = socket.socketpair()
        undo.callback(self._control.close)
        with theirs:
            self._output, log = os.pipe()
            undo.callback(os.close, self._output)
            with open(log, "wb", buffering=0) as log_file, _starting:
                self._guardian = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_GUARDIAN), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    umask=0o077,
                    env={name: os.environ[name] for name in _FOR_PYTHON if name in os.environ},
                    cwd=cwd,
                )
                _guardians.add(self._guardian.pid)
                if self._connects:  # before the order, and so before the engine
                    peers.guardians.add(self._guardian.pid)
        undo.callback(self._kill_guardian)
        self._control.setblocking(False)
        os.set_blocking(self._output, False)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(order) + 4096)
        if self._control.send(order) < len(order):
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))

    async def wait(self, seconds: float | None) -> bool:
        """Waits for the guardian's end, at most `seconds`. Returns False if the caller was cancelled meanwhile."""
        return await _undisturbed(asyncio.wait([self._gone], timeout=seconds))

    async def end(self, grace: float) -> bool:
        """Asks the processes to end, then kills them, until none is left. A cancellation does not end it. Returns True
        if there was one."""
        cancelled = False
        steps = chain([(self._ask, grace), (self._kill, _KILL_PATIENCE)], repeat((self._kill_guardian, _KILL_PATIENCE)))
        while not self._gone.done():
            step, patience = next(steps)
            step()
            cancelled |= not await self.wait(patience)
        self._reap_guardian()  # it has ended: we have adopted its processes
        # Without its last report the guardian was killed, and its processes may live.
        while not self._failure and self._returncode is None and self._kill_left():
            cancelled |= not await _undisturbed(asyncio.sleep(0.01))
        return cancelled

    def close(self) -> None:
        """Closes the log, the pipe and the socket. A guardian that still lives then kills the engine."""
        if self._resume:
            self._resume.cancel()
        self._loop.remove_reader(self._control)
        self._loop.remove_reader(self._output)
        self._control.close()
        self._reap_guardian()
        self._drain_log()
        os.close(self._output)
        self._log.close()

    def verdict(self) -> ModelRunnerError:
        """Returns the error for the end of the process."""
        if self._failure:
            return _start_error(self._program, *self._failure)
        lost = "the engine was lost: the guardian of its process was killed" if self._returncode is None else None
        return BackendExited(self._returncode, self._log.tail(), message=lost)

    def _ask(self) -> None:
        self._command(b"T")

    def _kill(self) -> None:
        self._command(b"K")

    def _command(self, command: bytes) -> None:
        with suppress(ConnectionError):  # it has just ended; its reports say so
            self._control.send(command)

    def _kill_guardian(self) -> None:
        """Kills a guardian that does not react, such as a stopped one. The kernel then kills the engine."""
        self._guardian.kill()
        self._reap_guardian()

    def _kill_left(self) -> int:
        """Kills the processes of a killed guardian. Returns how many were found."""
        with _starting:
            return kill_adopted(_guardians) + kill_marked(self._mark)

    def _reap_guardian(self) -> None:
        self._guardian.wait()
        _guardians.discard(self._guardian.pid)
        peers.guardians.discard(self._guardian.pid)

    def _read_reports(self) -> None:
        try:
            data = self._control.recv(4096)
        except ConnectionError:
            data = b""
        if not data:
            self._loop.remove_reader(self._control)
            self._gone.set_result(None)
        *lines, self._reports = (self._reports + data).split(b"\n")
        for line in lines:
            self._report(*line.decode().split())

    def _report(self, what: str, value: str) -> None:
        match what:
            case "started":
                if self._observer:
                    self._observer.started(int(value), self._sandbox)
                self._loop.add_reader(self._output, self._read_log)  # not earlier, so that no output comes before
            case "failed" | "unconfined":
                self._failure = what, int(value)
            case "exited":
                self._returncode = int(value)

    def _read_log(self) -> None:
        """Reads one portion in each turn of the loop."""
        chunk = os.read(self._output, _LOG_CHUNK)
        if len(chunk) == _LOG_CHUNK or not chunk:
            self._loop.remove_reader(self._output)
        if len(chunk) == _LOG_CHUNK:
            self._resume = self._loop.call_later(_FLOOD_PAUSE, self._loop.add_reader, self._output, self._read_log)
        self._log.feed(chunk)

    def _drain_log(self) -> None:
        """Reads the rest of the pipe, whose writers are all gone."""
        with suppress(BlockingIOError):
            while chunk := os.read(self._output, _LOG_CHUNK):
                self._log.feed(chunk)


async def _undisturbed(waiting: Awaitable[object]) -> bool:
    """Awaits `waiting`. Returns False if the caller was cancelled meanwhile, which the caller must remember."""
    try:
        await waiting
    except asyncio.CancelledError:
        return False
    return True


def _order(argv: Sequence[str], confinement: Confinement, mark: str, stop_signal: int) -> bytes:
    """Returns the first message to the guardian, which the same interpreter reads."""
    strings = [os.fsencode(argument) for argument in argv]
    env = {os.fsencode(name): os.fsencode(value) for name, value in {**confinement.env, MARK: mark}.items()}
    body = marshal.dumps((strings, env, confinement.order, lasting_mark(), int(stop_signal)))
    return len(body).to_bytes(8, "big") + body


def _start_error(program: str, step: str, number: int) -> ModelRunnerError:
    reason = os.strerror(number)
    if number in _EXHAUSTED:
        return Unavailable(f"no process can be started at the moment: {reason}; stop something, then try again")
    if step == "unconfined":
        return BackendUnavailable(
            f'the engine {program} cannot be confined here: {reason}; it runs unconfined with `sandbox = "off"` in '
            "config.toml"
        )
    return BackendUnavailable(f"the engine {program} cannot be executed: {reason}; install the engine again")
