"""Small models in safetensors: headers written by hand, so that they can be wrong, and folders as Hugging Face's
libraries write them."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelrunner.store import Store, StoredModel

CONFIG: Mapping[str, Any] = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048, "hidden_size": 8}


def document(header: object, data: int = 0, *, length: int | None = None) -> bytes:
    """A file with this header (as JSON, or the text itself) and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def weights(*names: str, seed: int = 0) -> bytes:
    """A file with a tensor of 8 bytes for each name."""
    table = {n: {"dtype": "F16", "shape": [2, 2], "data_offsets": [8 * i, 8 * i + 8]} for i, n in enumerate(names)}
    return document({"__metadata__": {"format": "pt"}} | table) + bytes([seed]) * (8 * len(names))


def model_files(seed: int = 0, **config: Any) -> dict[str, bytes]:
    return {
        "config.json": json.dumps(dict(CONFIG) | config).encode(),
        "model.safetensors": weights("a", "b", seed=seed),
        "tokenizer.json": b"{}",
    }


def sharded() -> dict[str, bytes]:
    files = model_files()
    del files["model.safetensors"]
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": names}).encode()}
    return files | index | {file: weights(tensor) for tensor, file in names.items()}


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def add_folder(store: Store, reference: str | None, files: Mapping[str, bytes], *, trust: bool = False) -> StoredModel:
    write(store.partial, files)
    blobs = {name: store.ingest(store.partial / name) for name in files}
    return store.create(blobs, reference, trust=trust)
