import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from modelrunner.errors import InvalidModel
from modelrunner.store import gguf_model
from modelrunner.store.ggml import FILE_TYPES, TENSOR_TYPES
from modelrunner.store.gguf import read_header
from tests.cost import cost
from tests.store.samples import PREAMBLE, write_gguf

HOSTILE = [0, 1, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str, code: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", code) + value


def tensor(name: str = "t", shape: tuple[int, ...] = (32,), code: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, offset)


def document(*parts: bytes, keys: int = 0, tensors: int = 0, version: int = 3, data: int = 4096) -> bytes:
    return PREAMBLE.pack(b"GGUF", version, tensors, keys) + b"".join(parts) + bytes(data)


def refused(path, content: bytes, match: str = "") -> None:
    path.write_bytes(content)
    assert cost(lambda: refuse(path, match)) < 1000


def refuse(path: Path, match: str = "") -> None:
    with pytest.raises(InvalidModel, match=f"^invalid model: .*{match}"):
        read_header(path)


def test_agrees_with_the_reference_reader(tmp_path):
    rng = np.random.default_rng(0)
    path = write_gguf(
        tmp_path / "m.gguf",
        vocabulary=5000,
        metadata={"a.flag": True, "a.text": "grüße", "a.list": [1, 2, 3], "a.number": -7, "a.float": 1.5},
        tensors={
            "half": rng.random((8, 64), dtype=np.float32).astype(np.float16),
            "quantized": gguf.quantize(rng.random((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0),
            "whole": np.arange(7, dtype=np.int32),
        },
    )
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    for field in theirs.fields.values():
        if field.name.startswith("GGUF."):
            continue
        if field.name.startswith("tokenizer.ggml"):
            assert ours.metadata[f"{field.name}.length"] == 5000
        else:
            assert ours.metadata[field.name] == field.contents()
    found = [(t.name, list(t.shape), t.dtype, t.size) for t in ours.tensors]
    assert found == [(t.name, t.shape.tolist(), t.tensor_type.name, t.n_bytes) for t in theirs.tensors]
    assert ours.architecture == "llama"


def test_tensor_and_file_types_are_those_of_the_reference():
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # never in a file; the Python package has the layout of an older ggml
            assert TENSOR_TYPES[kind.value] == (kind.name, block, size)
    for quantization in gguf.LlamaFileType:
        if quantization.name != "GUESSED":
            assert FILE_TYPES[quantization.value] == quantization.name.removeprefix("ALL_").removeprefix("MOSTLY_")


def test_short_arrays_are_kept_and_long_ones_counted(tmp_path):
    path = tmp_path / "m.gguf"
    numbers = struct.pack("<IQ4097I", 4, 4097, *range(4097))
    strings = struct.pack("<IQ", 8, 3) + string("a") + string("") + string(b"\xff")
    path.write_bytes(document(entry("long", 9, numbers), entry("short", 9, strings), keys=2))
    assert read_header(path).metadata == {"long.length": 4097, "short": ["a", "", "\N{REPLACEMENT CHARACTER}"]}


def test_a_string_that_is_too_long_to_keep_is_counted(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(document(entry("tokenizer", 8, string(b"x" * 2_000_000)), entry("b", 7, b"\x01"), keys=2))
    assert read_header(path).metadata == {"tokenizer.length": 2_000_000, "b": True}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a GGUF"),
        (b"GGUF", "not a GGUF"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF"),
        (PREAMBLE.pack(b"GGUF", 1, 0, 0), "version 1"),
        (PREAMBLE.pack(b"GGUF", 4, 0, 0), "version 4"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (document(entry("a", 4, bytes(4)), entry("a", 4, bytes(4)), keys=2), "twice"),
        (document(entry("a", 13, bytes(4)), keys=1), "unknown type 13"),
        (document(entry("a", 9, struct.pack("<IQ", 9, 1) + bytes(64)), keys=1), "array of the unsupported type 9"),
        (document(tensor(), tensor(), tensors=2), "the same name"),
        (document(tensor(code=4), tensors=1), "type 4"),
        (document(tensor(code=43), tensors=1), "type 43"),
        (document(tensor(shape=(2, 2, 2, 2, 2)), tensors=1), "5 dimensions"),
        (document(tensor(shape=(0,)), tensors=1), "cannot have the shape"),
        (document(tensor(shape=(33,), code=2), tensors=1), "cannot have the shape"),
        (document(tensor(offset=16), tensors=1), "not aligned"),
        (document(tensor(offset=4096), tensors=1), "after the end"),
        (document(tensor(shape=(2**63, 2**63)), tensors=1), "after the end"),
        (document(tensor("a", (1024,)), tensor("b", (1024,)), tensors=2, data=6000), "overlap"),
        (document(tensor("n" * 200), tensors=1), "200 bytes long"),
        (document(tensor(shape=(1024,)), tensors=1, data=0), "after the end"),
    ],
)
def test_faults_are_named(tmp_path, content, match):
    refused(tmp_path / "m.gguf", content, match)


@pytest.mark.parametrize("alignment", [0, 3, 48])
def test_alignment_is_a_power_of_two(tmp_path, alignment):
    value = entry("general.alignment", 4, struct.pack("<I", alignment))
    refused(tmp_path / "m.gguf", document(value, keys=1), "power of two")


def test_alignment_moves_the_data(tmp_path):
    path = tmp_path / "m.gguf"
    value = entry("general.alignment", 4, struct.pack("<I", 1024))
    path.write_bytes(document(value, tensor(shape=(256,)), keys=1, tensors=1, data=1024 + 1024))
    assert read_header(path).tensors[0].size == 1024
    refused(path, path.read_bytes()[:2000], "after the end")


@pytest.mark.parametrize("count", HOSTILE[2:])
@pytest.mark.parametrize(
    "build",
    [
        lambda n: document(keys=n),
        lambda n: document(tensors=n),
        lambda n: document(struct.pack("<Q", n), keys=1),
        lambda n: document(entry("a", 8, struct.pack("<Q", n)), keys=1),
        lambda n: document(entry("a", 9, struct.pack("<IQ", 0, n)), keys=1),
        lambda n: document(entry("a", 9, struct.pack("<IQ", 8, n)), keys=1),
        lambda n: document(entry("a", 9, struct.pack("<IQ", 12, n)), keys=1),
        lambda n: document(tensor(shape=(n,)), tensors=1),
        lambda n: document(tensor(offset=n & ~31), tensors=1),
        lambda n: document(struct.pack("<Q", n), tensors=1),
    ],
)
def test_no_count_is_believed(tmp_path, build, count):
    refused(tmp_path / "m.gguf", build(count))


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((entry("a", 9, struct.pack("<IQ", 8, 2**32)),), id="empty strings"),
        pytest.param(
            tuple(entry(f"{n}", 9, struct.pack("<IQ", 0, 4096) + bytes(4096)) for n in range(2000)), id="lists"
        ),
        pytest.param(tuple(entry(f"{n}", 8, string(bytes(10**6))) for n in range(20)), id="texts"),
    ],
)
def test_a_large_file_cannot_use_much_memory_or_time(tmp_path, parts):
    path = tmp_path / "m.gguf"
    path.write_bytes(document(*parts, keys=len(parts)))
    os.truncate(path, 1 << 40)  # sparse: room for any count
    assert cost(lambda: refuse(path)) < 1000


def test_large_vocabularies_are_skipped_quickly(tmp_path):
    path = tmp_path / "m.gguf"
    tokens = struct.pack("<IQ", 8, 500_000) + string("token") * 500_000
    path.write_bytes(document(entry("tokens", 9, tokens), keys=1))
    assert read_header(path).metadata == {"tokens.length": 500_000}
    assert cost(lambda: read_header(path)) < 100, "about what 20 empty steps for each entry take"


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(write_gguf(tmp_path / "m.gguf"))
    for path in (tmp_path / "fifo", tmp_path / "link", tmp_path, tmp_path / "absent"):
        with pytest.raises(InvalidModel):
            read_header(path)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return folder, write_gguf(folder / "sample.gguf").read_bytes()


def test_every_cut_is_noticed(sample):
    folder, content = sample
    path = folder / "cut.gguf"
    path.write_bytes(content)
    padding = len(content) % 32
    for length in [*range(len(content) - padding - 1, 700, -97), *range(700, -1, -1)]:
        os.truncate(path, length)
        with pytest.raises(InvalidModel):
            read_header(path)


PATCHES = st.lists(
    st.tuples(
        st.integers(0, 900),
        st.one_of(
            st.binary(min_size=1, max_size=8),
            st.sampled_from(HOSTILE).map(lambda n: struct.pack("<Q", n)),
            st.sampled_from(HOSTILE).map(lambda n: struct.pack("<I", n & 0xFFFFFFFF)),
        ),
    ),
    max_size=4,
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PATCHES)
@example([(8, struct.pack("<Q", 2**63))])
@example([(16, struct.pack("<Q", 2**63))])
def test_a_changed_file_is_read_or_refused_and_nothing_else(sample, patches):
    folder, content = sample
    changed = bytearray(content)
    for position, patch in patches:
        changed[position : position + len(patch)] = patch
    path = folder / "changed.gguf"
    path.write_bytes(changed)
    try:
        header = read_header(path)
    except InvalidModel:
        return
    assert sum(t.size for t in header.tensors) <= len(changed)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"llama.block_count": 10**9}, "more than any model has"),
        ({"llama.block_count": 2**63 - 1}, "more than any model has|not a whole number"),
        ({"llama.block_count": True}, "not a whole number"),
        ({"llama.block_count": "4"}, "not a whole number"),
        ({"llama.context_length": True}, "not a whole number"),
        ({"llama.attention.head_count_kv": [1, 2**40]}, "not a whole number"),
        ({"tokenizer.ggml.tokens.length": "many"}, "not a whole number|twice"),
        ({"tokenizer.ggml.eos_token_id": "two"}, "not a whole number"),
        ({"tokenizer.chat_template": "x" * 200_000}, "chat template"),
        ({"tokenizer.chat_template.tool_use": "x" * (1 << 21)}, "chat template"),
        ({"general.architecture": "a" * 1_000_000}, "1000000 characters"),
    ],
)
def test_figures_that_no_model_has_are_refused_at_once(tmp_path, metadata, match):
    """Before anything is computed with them, in a layer each or otherwise."""
    architecture = metadata.pop("general.architecture", "llama")
    kinds = {bool: 7, str: 8, int: 11}
    parts = [entry("general.architecture", 8, string(architecture))]
    for key, value in metadata.items():
        if isinstance(value, list):
            parts.append(entry(key, 9, struct.pack(f"<IQ{len(value)}q", 11, len(value), *value)))
        else:
            data = string(value) if isinstance(value, str) else struct.pack("<?" if value is True else "<q", value)
            parts.append(entry(key, kinds[type(value)], data))
    (tmp_path / "m.gguf").write_bytes(document(*parts, tensor(), keys=len(parts), tensors=1))
    with pytest.raises(InvalidModel, match=match):
        gguf_model.read({"m.gguf": tmp_path / "m.gguf"})
