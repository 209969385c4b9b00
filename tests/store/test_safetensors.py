"""The header of one file: what the reference implementation takes, and what nobody may."""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelrunner.errors import InvalidModel
from modelrunner.store.safetensors import read_tensors
from modelrunner.types import Tensor
from tests.cost import cost
from tests.store.folders import document, weights

HOSTILE = [2**31 - 1, 2**32, 2**62, 2**63, 2**64 - 1]
CAP = 16 << 20


def entry(shape: list[int], first: int, last: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def refused(path: Path, content: bytes, match: str = "") -> None:
    path.write_bytes(content)
    assert cost(lambda: refuse(path, match)) < 1000


def refuse(path: Path, match: str = "") -> None:
    with pytest.raises(InvalidModel, match=f"^invalid model: .*{match}"):
        read_tensors(path)


def test_the_table_in_the_order_of_the_data(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt", "note": 'a {"b": [1]} \\ :'},
        "last": entry([3], 20, 26, "BF16"),
        "a:b": entry([2, 2], 0, 16),
        "scalar": entry([], 16, 20),
        "nothing": entry([0, 5], 16, 16),
        "packed": entry([3], 26, 28, "F4") | {"shape": [4]},
    }
    path = tmp_path / "m.safetensors"
    path.write_bytes(document(json.dumps(header, indent=2).encode() + b"   ", 28))
    assert read_tensors(path) == (
        Tensor("a:b", (2, 2), "F32", 16),
        Tensor("nothing", (0, 5), "F32", 0),
        Tensor("scalar", (), "F32", 4),
        Tensor("last", (3,), "BF16", 6),
        Tensor("packed", (4,), "F4", 2),
    )


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a safetensors"),
        (b"GGUF\3\0\0\0" + bytes(100), "not a safetensors|damaged|ends within"),
        (document(b"[]"), "not a safetensors"),
        (document(b" {}"), "not a safetensors"),
        (document(b"{"), "not valid JSON"),
        (document(b'{"a": 1}'), "its header is invalid"),
        (document(b'{"\xff": {}}'), "not valid JSON"),
        (document({"__metadata__": {"a": 1}}), "its header is invalid"),
        (document({"a": entry([1], 0, 4) | {"code": "x"}}, 4), "its header is invalid"),
        (document({"a": {"dtype": "F32", "shape": [1]}}, 4), "its header is invalid"),
        (document({"a": entry([-1], 0, 4)}, 4), "its header is invalid"),
        (document({"a": entry([1], 0, 4)}, 3), "truncated"),
        (document({"a": entry([1], 0, 4)}, 5), "1 bytes after its last tensor"),
        (document({"a": entry([2], 0, 4)}, 4), "4 bytes of data, but a shape of 8"),
        (document({"a": entry([1], 4, 0)}, 4), "bytes of data"),
        (document({"a": entry([1], 4, 8)}, 8), "a hole"),
        (document({"a": entry([1], 0, 4), "b": entry([1], 2, 6)}, 6), "an overlap"),
        (document({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, 4), "an overlap"),
        (document({"a": entry([1], 0, 4, "F31")}, 4), "unknown here"),
        (document({"a": entry([1], 0, 0, "F4")}), "within a byte"),
        (document({"a": entry([1] * 33, 0, 4)}, 4), "33 dimensions"),
    ],
)
def test_faults_are_named(tmp_path: Path, content: bytes, match: str) -> None:
    refused(tmp_path / "m", content, match)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": E, "a": E}',
        '{"a": E, "\\u0061": E}',
        '{"a": {"dtype": "U32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        '{"__metadata__": {"a": "1", "a": "2"}, "a": E}',
        '{"__metadata__": {}, "__metadata__": {}, "a": E}',
    ],
)
def test_a_key_twice_is_refused_however_it_is_written(tmp_path: Path, text: str) -> None:
    refused(tmp_path / "m", document(text.replace("E", json.dumps(entry([1], 0, 4))).encode(), 4), "a key twice")


@pytest.mark.parametrize("number", HOSTILE)
@pytest.mark.parametrize(
    "build",
    [
        lambda n: document(b"{}", length=n),
        lambda n: document({"a": entry([n], 0, 4)}, 4),
        lambda n: document({"a": entry([n, n, n], 0, 4)}, 4),
        lambda n: document({"a": entry([n, 0], 0, 4)}, 4),
        lambda n: document({"a": entry([1], n, n + 4)}, 4),
        lambda n: document({"a": entry([n], 0, 4 * n)}, 4),
    ],
)
def test_no_number_is_believed(tmp_path: Path, build: Callable[[int], bytes], number: int) -> None:
    refused(tmp_path / "m", build(number))


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: b'{"a":' + b"[" * (CAP - 10), id="deep"),
        pytest.param(lambda: b'{"' + b'\\"' * (CAP // 2 - 4), id="quotes"),
        pytest.param(lambda: b'{"a":{"dtype":"U8","shape":[' + b"[]," * (CAP // 3 - 20), id="lists"),
        pytest.param(lambda: b"{" + b",".join(b'"%x":0' % n for n in range(300_000)), id="members"),
        pytest.param(
            lambda: b'{"a":{"dtype":"U8","data_offsets":[0,1],"shape":[1' + b"0" * (CAP - 100) + b"]}}", id="digits"
        ),
    ],
)
def test_a_huge_header_cannot_use_much_memory_or_time(tmp_path: Path, build: Callable[[], bytes]) -> None:
    path = tmp_path / "m"
    path.write_bytes(document(build()[:CAP], 8))
    tracemalloc.start()
    try:
        assert cost(lambda: refuse(path)) < 1000
        assert tracemalloc.get_traced_memory()[1] < CAP + (64 << 20)
    finally:
        tracemalloc.stop()


def test_a_header_beyond_the_cap_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(struct.pack("<Q", CAP + 1) + b"{")
    os.truncate(path, 1 << 40)  # sparse: room for any length
    with pytest.raises(InvalidModel, match="claims to have a header"):
        read_tensors(path)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "fifo", tmp_path / "link", tmp_path, tmp_path / "absent"):
        with pytest.raises(InvalidModel):
            read_tensors(path)


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    content = weights("a", "b", "c")
    for length in range(len(content)):
        refused(tmp_path / "m", content[:length])


PATCHES = st.lists(
    st.tuples(
        st.integers(0, 300),
        st.one_of(
            st.binary(min_size=1, max_size=8),
            st.sampled_from(HOSTILE).map(lambda n: struct.pack("<Q", n)),
            st.sampled_from(['"', "{", "}", ":", ",", "[", "0", "-1", "1e9", "null", '"F64"']).map(str.encode),
        ),
    ),
    max_size=4,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PATCHES)
def test_a_changed_file_is_read_or_refused_and_nothing_else(tmp_path: Path, patches: list[tuple[int, bytes]]) -> None:
    content = weights("a", "b")
    changed = bytearray(content)
    for position, patch in patches:
        changed[position : position + len(patch)] = patch
    path = tmp_path / "m"
    path.write_bytes(changed)
    try:
        tensors = read_tensors(path)
    except InvalidModel:
        return
    (length,) = struct.unpack_from("<Q", changed)
    assert sum(tensor.size for tensor in tensors) == len(changed) - 8 - length
