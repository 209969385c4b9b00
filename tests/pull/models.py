"""Small models: GGUF files that the store takes, and wheels that carry them."""

import base64
import hashlib
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

_UINT32, _STRING = 4, 8
_F32 = 0
_ALIGNMENT = 32


def gguf(size: int = 4096, *, seed: int = 0, architecture: str = "llama", kind: str = "model") -> bytes:
    """A GGUF (version 3) with one tensor of about `size` bytes, the same for the same arguments."""
    return _file({"general.architecture": architecture, "general.type": kind}, size, seed)


def adapter(size: int = 512) -> bytes:
    """A LoRA adapter for the models of `gguf`, which changes none of their tensors."""
    metadata = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    return _file(metadata, size, seed=0)


def shards(count: int, size: int = 4096) -> list[bytes]:
    """A model in `count` files, as llama-gguf-split makes them."""
    common: dict[str, str | int] = {"general.architecture": "llama", "split.count": count}
    return [_file({**common, "split.no": number}, size, seed=number) for number in range(count)]


def _file(metadata: Mapping[str, str | int], size: int, seed: int) -> bytes:
    elements = size // 4
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(metadata))
    for key, value in metadata.items():
        typed = struct.pack("<II", _UINT32, value) if isinstance(value, int) else _typed_string(value)
        head += _string(key) + typed
    head += _string(f"blk.{seed}.weight") + struct.pack("<IQIQ", 1, elements, _F32, 0)
    return head + bytes(-len(head) % _ALIGNMENT) + Random(seed).randbytes(elements * 4)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _typed_string(text: str) -> bytes:
    return struct.pack("<I", _STRING) + _string(text)


def wheel(
    folder: Path,
    name: str,
    members: Mapping[str, bytes],
    *,
    version: str = "1.0",
    requires: Sequence[str] = (),
    recorded: Mapping[str, bytes] | None = None,
) -> Path:
    """A wheel of a package. `recorded` is what RECORD describes, the members themselves by default."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    requirements = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    files = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirements}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [
        f"{file},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for file, data in {**files, **(recorded or {})}.items()
    ]
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in files.items():
            archive.writestr(file, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]))
    return path
