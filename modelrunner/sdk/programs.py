"""Runs the programs of an installation (pip, cmake, ninja) for backends, under the same guardian as engines."""

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from modelrunner.errors import BackendExited, BackendUnavailable
from modelrunner.processes.process import run, scrubbed_environment
from modelrunner.sandbox import Sandbox
from modelrunner.types import ProcessOptions

# Variables of pip, cmake and compilers: index, proxy, certificates, toolchain. Other variables, such as tokens, do not
# reach third-party build scripts.
_KEPT = (
    *("PIP_*", "*_PROXY", "*_proxy", "NETRC", "XDG_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO"),
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_*", "CUDACXX", "SDKROOT", "DEVELOPER_DIR", "CPATH"),
    *("LIBRARY_PATH", "PKG_CONFIG_PATH", "VULKAN_SDK"),
)
_ELSEWHERE = ("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV")  # would install in another place
_LOG_LIMIT = 64 << 20


class StepFailed(BackendUnavailable):
    """A program of an installation failed. `lines` are the last lines that it wrote."""

    def __init__(self, message: str, lines: Sequence[str]) -> None:
        super().__init__(message)
        self.lines = tuple(lines)


class _OutputLines:
    """The observer of a step. It passes lines on, and keeps the last of them."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.last: deque[str] = deque(maxlen=40)
        self._on_line = on_line

    def started(self, pid: int, sandbox: Sandbox) -> None: ...

    def output(self, line: str) -> None:
        self.last.append(line)
        self._on_line(line)


async def execute(
    argv: Sequence[str | Path],
    *,
    log: Path,
    on_line: Callable[[str], None] = lambda _: None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Runs one program to its end, and writes all its output to `log`. Raises `StepFailed` if it fails. When the caller
    is cancelled, or this process dies, all processes of the program end, too."""
    words = [str(word) for word in argv]
    kept = scrubbed_environment(keep=_KEPT) | dict(env or {})
    environment = {name: value for name, value in kept.items() if name not in _ELSEWHERE}
    lines = _OutputLines(on_line)
    try:
        await run(words, env=environment, options=ProcessOptions(log, lines, 3.0, _LOG_LIMIT))
    except BackendExited as ended:
        if ended.returncode != 0:
            how = ended.message.removeprefix("the engine ")
            message = f"{Path(words[0]).name} {how}: {_reason(lines.last)}; see {log}"
            raise StepFailed(message, lines.last) from None


def _reason(lines: Sequence[str]) -> str:
    """Returns the line to show: the last one with the word error, or the last one of all."""
    errors = [line for line in lines if "error" in line.lower()]
    return ([*lines, *errors] or [""])[-1].strip()[:300]


def base_python() -> Path:
    """Returns the interpreter that our own environment was made with, so that an engine's environment outlives ours.
    Where it cannot be found, returns our own interpreter."""
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return base if base.exists() else Path(sys.executable)


def pip(*words: str | Path) -> list[str | Path]:
    """Returns the command line of our own pip, with the user's configuration."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
