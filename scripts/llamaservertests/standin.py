"""A small stand-in for the stories models of llama.cpp's tests, which have a megabyte: SmolLM2 with its first
layers alone. What it says means nothing, and is the same on both sides."""

from pathlib import Path

import gguf

NAME = "test/small"
LAYERS = 2


def write(path: Path, model: Path) -> None:
    """Writes the first layers of the GGUF file `model` to `path`."""
    reader = gguf.GGUFReader(model)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    architecture = fields.pop("general.architecture").contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in fields.items():
        array = field.types[0] == gguf.GGUFValueType.ARRAY
        value = LAYERS if name == f"{architecture}.block_count" else field.contents()
        writer.add_key_value(name, value, field.types[0], field.types[-1] if array else None)
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] != "blk" or int(parts[1]) < LAYERS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
