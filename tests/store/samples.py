"""Small models for the tests, written by the reference implementation (the `gguf` package)."""

import contextlib
import os
import struct
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from modelrunner.store import Blob, Store, StoredModel

PREAMBLE = struct.Struct("<4sIQQ")


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    seed: int = 0,
    vocabulary: int = 16,
    words: Mapping[int, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    shard: tuple[int, int] | None = None,
) -> Path:
    """`words` replaces some of the vocabulary. `shard` is the number and the count of a split model; shards after the
    first carry no other metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    if shard:
        writer.add_uint16("split.no", shard[0])
        writer.add_uint16("split.count", shard[1])
    writer.add_context_length(2048)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_token_list([(words or {}).get(n, f"token{n}") for n in range(vocabulary)])
    writer.add_token_scores([0.5] * vocabulary)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, data in (tensors if tensors is not None else _tensors(seed, shard)).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0 if data.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(seed: int, shard: tuple[int, int] | None) -> dict[str, np.ndarray]:
    first = shard[0] * 2 if shard else 0
    return {
        f"blk.{first}.weight": np.full((32, 64), seed, dtype=np.float16),
        f"blk.{first + 1}.weight": np.full((64,), seed, dtype=np.float32),
    }


def ingest(store: Store, seed: int = 0, **options: Any) -> Blob:
    return store.ingest(write_gguf(store.partial / f"{seed}.gguf", seed=seed, **options))


def add_model(store: Store, reference: str | None, seed: int = 0, **options: Any) -> StoredModel:
    return store.create({"any.gguf": ingest(store, seed, **options)}, reference)


def unusable(store: Store) -> list[StoredModel]:
    return store.list(unusable=True)[len(store.list()) :]


@contextlib.contextmanager
def deep_folder(folder: Path, levels: int = 3000) -> Iterator[None]:
    """Makes folders in folders in `folder`, deeper than a path can say, and removes what is left of them."""
    folder.mkdir()
    outer = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a", dir_fd=outer)
        inner = os.open("a", os.O_RDONLY, dir_fd=outer)
        os.close(outer)
        outer = inner
    os.close(outer)
    try:
        yield
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)


def files_under(folder: Path) -> dict[str, int]:
    """Size by path, of everything but the reserve."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.name != "reserve":
                found[str(path.relative_to(folder))] = path.stat().st_size
    return found
