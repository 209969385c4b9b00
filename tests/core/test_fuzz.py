"""Whatever a stranger's text holds (files of models, a Modelfile, another program's configuration, a form, a header),
its parser refuses it in words or takes it, in a time and a memory that grow with its size alone. The seeds are whole
texts with some bytes changed; `nightly` tries many more. Each test prints its figures (`-rP`). JSON of clients:
tests/gateway/test_any_request.py; answers of engines: tests/gateway/test_odd_events.py."""

import contextlib
import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelrunner import modelfile
from modelrunner.cli.llamaswap import converted
from modelrunner.errors import BadRequest, InvalidModel, InvalidReference
from modelrunner.gateway.multipart import words_of
from modelrunner.models.foreign import ollama_models
from modelrunner.oci.authorization import challenges
from modelrunner.store import gguf, manifests, safetensors, tar
from modelrunner.store.digests import Digest
from modelrunner.store.references import Reference
from tests.fuzzing import Figures
from tests.store.folders import weights
from tests.store.samples import write_gguf

REFUSED = (InvalidModel, InvalidReference, BadRequest)

Parser = Callable[[bytes, Path], object]


def read_gguf(data: bytes, file: Path) -> object:
    file.write_bytes(data)
    return gguf.read_header(file)


def read_safetensors(data: bytes, file: Path) -> object:
    file.write_bytes(data)
    return safetensors.read_tensors(file)


def read_tar(data: bytes, file: Path) -> object:
    return [(member.name, member.content(1 << 20)) for member in tar.members(io.BytesIO(data), limit=1 << 24)]


def read_gzip(data: bytes, file: Path) -> object:
    stream = tar.Gunzipped(io.BytesIO(data))
    return [(member.name, member.content(1 << 20)) for member in tar.members(stream, limit=1 << 24)]


def read_manifest(data: bytes, file: Path) -> object:
    return manifests.decode(data, Digest.of(data))


def read_config(data: bytes, file: Path) -> object:
    try:
        return manifests.decode_config(data)
    except ValueError:  # msgspec's errors, which both callers translate
        return None


def read_reference(data: bytes, file: Path) -> object:
    return Reference.parse(data.decode("utf-8", "replace"))


def read_modelfile(data: bytes, file: Path) -> object:
    return modelfile.parse(modelfile.decoded(data))


def read_llama_swap(data: bytes, file: Path) -> object:
    return converted(data, {})


def read_ollama_manifest(data: bytes, file: Path) -> object:
    """As the only one of a store. A file that is no manifest is no model."""
    manifest = file.parent / "ollama/manifests/registry.ollama.ai/library/m/latest"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_bytes(data)
    return list(ollama_models(file.parent / "ollama"))


def read_form(data: bytes, file: Path) -> object:
    return words_of("multipart/form-data; boundary=b", [data[at : at + 50] for at in range(0, len(data), 50)])


def read_form_type(data: bytes, file: Path) -> object:
    return words_of(data.decode("latin-1"), [FORM])


def read_challenges(data: bytes, file: Path) -> object:
    return challenges(data.decode("latin-1"))


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\nRIFF\r\n'
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nsmol\r\n--b--\r\n'
)
MODELFILE = (
    b'FROM a\nSYSTEM """You are\na pirate."""\nPARAMETER stop "x"\nPARAMETER seed 1\nMESSAGE user hi\nLICENSE x\n'
)
LLAMA_SWAP = b"""
macros: {"server": "llama-server --port ${PORT}"}
models:
  small: {cmd: "${server} -m a.gguf", aliases: [a], ttl: 60, env: ["A=1"], filters: {stripParams: "temperature"}}
groups: {g: {members: [small]}}
"""


def packed() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("config.json", "a" * 150, "folder/ä.bin"):
            member = tarfile.TarInfo(name)
            member.size = 700
            archive.addfile(member, io.BytesIO(bytes(700)))
    return buffer.getvalue()


def manifest() -> bytes:
    layer = {"mediaType": "application/vnd.docker.ai.gguf.v3", "digest": f"sha256:{'1' * 64}", "size": 9}
    config = {
        "mediaType": "application/vnd.docker.ai.model.config.v0.1+json",
        "digest": f"sha256:{'2' * 64}",
        "size": 2,
    }
    document = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
    return json.dumps({**document, "config": config, "layers": [layer, layer]}).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


PARSERS: dict[Parser, Callable[[Path], bytes]] = {
    read_gguf: lambda folder: write_gguf(folder / "seed.gguf").read_bytes(),
    read_safetensors: lambda folder: weights("a", "b"),
    read_tar: lambda folder: packed(),
    read_gzip: lambda folder: gzip.compress(packed()),
    read_manifest: lambda folder: manifest(),
    read_config: lambda folder: json.dumps({"config": {"format": "gguf"}, "descriptor": {}, "files": []}).encode(),
    read_modelfile: lambda folder: MODELFILE,
    read_llama_swap: lambda folder: LLAMA_SWAP,
    read_ollama_manifest: lambda folder: manifest(),
    read_form: lambda folder: FORM,
    read_form_type: lambda folder: b'multipart/form-data; boundary="b"; charset=utf-8',
    read_challenges: lambda folder: (
        b'Bearer realm="https://a.example/token",service="s",scope="a:b:pull", Basic realm="x"'
    ),
    read_reference: lambda folder: b"registry.example:5000/org/name-x:tag.1@sha256:" + b"0" * 64,
}


def read(parse: Parser, data: bytes, file: Path) -> None:
    with contextlib.suppress(*REFUSED):
        parse(data, file)


changes = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(["set", "cut", "double"]), st.binary(max_size=9)),
    max_size=5,
)


def changed(seed: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    data = seed
    for where, kind, new in changes:
        place = int(where * len(data))
        if kind == "set":
            data = data[:place] + new + data[place + len(new) :]
        elif kind == "cut":
            data = data[:place] + data[place + len(new) * 7 :]
        else:
            data = data[:place] + data[place : place + 64] * (1 + len(new)) + data[place:]
    return data


@pytest.mark.parametrize("examples", [100, pytest.param(20_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("parse", PARSERS)
def test_a_changed_file_is_taken_or_refused(parse: Parser, examples: int, folder: Path) -> None:
    seed = PARSERS[parse](folder)
    parse(seed, folder / "whole")
    figures = Figures()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(changes)
    def run(changes: list[tuple[float, str, bytes]]) -> None:
        data = changed(seed, changes)
        figures.take(lambda: read(parse, data, folder / "changed"), len(data))

    run()
    print(figures)


def with_counts(tensors: int, values: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, values)


def one_array(kind: int, count: int) -> bytes:
    return with_counts(0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, kind, count)


def pax(records: bytes) -> bytes:
    member = tarfile.TarInfo("x")
    member.size, member.type = len(records), b"x"
    return member.tobuf() + records + bytes(-len(records) % 512)


WORST: dict[str, tuple[Parser, bytes]] = {
    "many values": (read_gguf, with_counts(0, 1 << 40) + (struct.pack("<Q2sIB", 2, b"ab", 7, 1) * 20_000)),
    "many tensors": (read_gguf, with_counts(1 << 40, 0) + bytes(400_000)),
    "an array of empty texts": (read_gguf, one_array(8, 1 << 40) + bytes(400_000)),
    "arrays in arrays": (read_gguf, one_array(9, 1) + struct.pack("<IQ", 9, 1) * 30_000),
    "an endless header": (read_safetensors, struct.pack("<Q", 300_000) + b"[" * 300_000),
    "many tensors in JSON": (read_safetensors, struct.pack("<Q", 300_008) + b'{"a":1,' + b'"b":{},' * 43_000),
    "many empty members": (read_tar, tarfile.TarInfo("a").tobuf() * 600),
    "many records": (read_tar, pax(b"7 a=bc\n" * 9000) * 4),
    "many empty gzip members": (read_gzip, gzip.compress(b"") * 50_000),
    "zeros between gzip members": (read_gzip, (gzip.compress(b"") + bytes(500)) * 900),
    "a long name": (read_reference, b"a" * 200_000),
    "many dashes": (read_reference, b"a" + b"-" * 100_000 + b"!"),
    "many slashes": (read_reference, b"a/" * 100_000),
    "many colons": (read_reference, b"a:" * 100_000),
    "many instructions": (read_modelfile, b"FROM a\n" + b"PARAMETER stop x\n" * 20_000),
    "open quotes": (read_modelfile, b"FROM a\n" + b'SYSTEM """\n' * 20_000),
    "macros in macros": (read_llama_swap, b"macros: {a: '" + b"${a}" * 2000 + b"'}\nmodels: {m: {cmd: '${a}'}}"),
    "aliases of YAML": (
        read_llama_swap,
        b"a0: &a0 [x, x]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 40)),
    ),
    "deep YAML": (read_llama_swap, b"[" * 1_000_000),
    "many parts": (read_form, b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n\r\n' * 10_000),
    "an endless head": (read_form, b"--b\r\n" + b"a: b\r\n" * 50_000),
    "boundaries that are none": (read_form, FORM[:120] + b"\n--a" * 50_000),
    "many parameters": (read_form_type, b"multipart/form-data" + b'; a="\\a' * 20_000),
    "many spaces": (read_challenges, b"Basic" + b" " * 100_000 + b"\0"),
    "many backslashes": (read_challenges, b'Basic realm="' + b"\\" * 100_001),
    "deep JSON": (read_manifest, b'{"layers":' + b"[" * 200_000),
    "many layers": (read_manifest, manifest()[:-2] + b"," + b"{}," * 100_000 + b"{}]}"),
    "a large configuration": (read_config, b'{"config":{' + b'"a":[[],[]],' * 20_000 + b'"b":1}}'),
}


@pytest.mark.parametrize("name", WORST)
def test_the_worst_file_costs_what_its_size_allows(name: str, folder: Path) -> None:
    parse, data = WORST[name]
    figures = Figures()
    figures.take(lambda: read(parse, data, folder / "worst"), len(data))
    print(figures)


def test_an_archive_of_a_few_gzip_members_is_read() -> None:
    data = packed()
    pieces = [data[start : start + 100] for start in range(0, len(data), 100)]
    stream = tar.Gunzipped(io.BytesIO(b"".join(map(gzip.compress, pieces))))
    assert next(tar.members(stream, limit=1 << 20)).name == "config.json"


def test_an_archive_of_empty_gzip_members_is_refused() -> None:
    with pytest.raises(InvalidModel, match="gzip members"):
        read_gzip(gzip.compress(b"") * 50_000, Path())
