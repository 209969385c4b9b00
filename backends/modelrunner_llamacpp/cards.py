"""The graphics card of this machine: which build of llama.cpp can compute on it, and what such a build needs."""

import platform
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from modelrunner_llamacpp import repack

_MANY = 1 << 30  # bytes of a card's own memory; the share that a processor's own graphics keep aside is smaller
_PCI_INTEL = 0x8086
_GRAPHICS_OF_INTEL = "0000:00:02.0"  # the place of those of a processor; igt-gpu-tools tells them by it, too


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of card, and the build for it."""

    #: The maker, for people.
    name: str
    #: What the build computes with: CUDA, Vulkan or Metal.
    means: str
    #: CMake's option.
    option: str
    #: The variant of llama.cpp that computes with it.
    variant: str
    #: The program that compiles for it, "" where the C++ compiler does.
    tool: str = ""
    #: The package that has the tool, for people.
    package: str = ""

    @property
    def is_buildable(self) -> bool:
        """Returns True if the tool is here."""
        return not self.tool or shutil.which(self.tool) is not None

    def advice(self, *, is_for_it: bool = False) -> str:
        """Returns a sentence about an engine that cannot use this card, with what mends it. An engine that `is_for_it`
        finds no card where the card's driver fails."""
        if is_for_it:
            return (
                f"the {self.name} card of this machine is idle, because llama.cpp finds no device: its driver "
                "fails, or was updated since the machine started"
            )
        prebuilt = not self.is_buildable and has_prebuilt()
        first = "" if self.is_buildable or prebuilt else f"install {self.package} (it has {self.tool}), then "
        return (
            f"the {self.name} card of this machine is idle, because this engine computes on the processor: {first}"
            f"`modelrunner install llama.cpp --variant {'vulkan' if prebuilt else self.variant}`"
        )


_NVIDIA = Card("NVIDIA", "CUDA", "-DGGML_CUDA=ON", "cuda", "nvcc", "NVIDIA's CUDA toolkit")
_AMD = Card("AMD", "Vulkan", "-DGGML_VULKAN=ON", "vulkan", "glslc", "the tools and headers of Vulkan")
_INTEL = replace(_AMD, name="Intel")
GRAPHICS = replace(_AMD, name="graphics")
_APPLE = Card("Apple", "Metal", "-DGGML_METAL=ON", "metal")
_ROCM = Card("AMD", "ROCm", "-DGGML_HIP=ON", "rocm", "hipcc", "AMD's ROCm")
OF_VARIANT = {"cuda": _NVIDIA, "rocm": _ROCM, "vulkan": GRAPHICS, "metal": _APPLE}
"""The card that a build of each variant is for. The variant cpu has none."""
VARIANTS = (*OF_VARIANT, "cpu")
_PREBUILT_GLIBC = (2, 35)


def has_prebuilt() -> bool:
    """Returns True if the prebuilt Vulkan engine (engines.py) runs on this system. It is compiled for processors with
    AVX-512: on others it lists its devices, and ends with SIGILL once it loads a model."""
    name, version = platform.libc_ver()
    if (sys.platform, platform.machine(), name) != ("linux", "x86_64", "glibc"):
        return False
    if "avx512f" not in repack.features():
        return False
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) >= _PREBUILT_GLIBC


def find(root: Path = Path("/")) -> Card | None:
    """Returns the card whose driver is here, None without one. A processor's own graphics do not count: they share its
    memory, and are seldom faster."""
    if sys.platform == "darwin":
        return _APPLE if platform.machine() == "arm64" else None
    if (root / "dev/nvidiactl").exists():
        return _NVIDIA
    drm = root / "sys/class/drm"
    if any(_number(total) >= _MANY for total in drm.glob("card*/device/mem_info_vram_total")):
        return _AMD
    intels = (vendor.parent.resolve() for vendor in drm.glob("card*/device/vendor") if _number(vendor) == _PCI_INTEL)
    return _INTEL if any(device.name != _GRAPHICS_OF_INTEL for device in intels) else None


def _number(file: Path) -> int:
    try:
        return int(file.read_text("ascii"), 0)
    except (OSError, ValueError):
        return 0
