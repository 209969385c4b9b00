"""Registries that lie, stall, redirect or ask for passwords that are not theirs."""

import asyncio
import contextlib
import io
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from modelrunner.errors import InvalidModel, ModelNotFound, ModelRunnerError, SourceFailed
from modelrunner.oci.authorization import challenges
from modelrunner.oci.credentials import Credential
from modelrunner.oci.registries import RegistryRules
from modelrunner.oci.repository import Manner
from modelrunner.store import tar
from tests.cost import cost
from tests.oci import artifacts
from tests.oci.artifacts import CNCF, DOCKER, NOTHING, V1, docker_config, modelpack_config
from tests.oci.conftest import Machine
from tests.oci.fake import Answer, FakeRegistry, body, first, status
from tests.oci.registry import Artifact, artifact
from tests.oci.test_pull import tiny
from tests.pull.models import gguf
from tests.pull.test_hostile import at_once
from tests.pull.test_puller import ignore

SIZE = 3 << 20
IMPATIENT = Manner(pause=at_once, look_up_limit=4.0, patience=0.2)
A = tarfile.TarInfo("a").tobuf()
"""An empty file of a tar."""
ADA = Credential("ada", "a-secret-word")


@pytest.fixture
async def fake() -> AsyncIterator[FakeRegistry]:
    async with FakeRegistry({"ai/tiny": tiny(SIZE)}).running() as running:
        yield running


@pytest.fixture
async def other() -> AsyncIterator[FakeRegistry]:
    """Another server, which nobody named."""
    async with FakeRegistry().running() as running:
        yield running


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine", manner=IMPATIENT)


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(bytes(1 << 20))


async def trickle(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.01)


ANSI = "\x1b]0;owned\x07\x1b[31m"


@pytest.mark.parametrize(
    ("where", "answer", "said"),
    [
        ("manifests/", endless, "more than"),
        ("manifests/", trickle, "did not answer within"),
        ("manifests/", body(b" " * (5 << 20)), "more than 4194304 bytes"),
        ("manifests/", body(b"[" * 100_000), "cannot be parsed"),
        ("manifests/", body(b"{}", Content_Encoding="br"), "encoding"),
        ("manifests/", body(ANSI.encode(), 500), "answered 500"),
        ("manifests/", status(429, Retry_After="3600"), "answered 429"),
        ("manifests/", status(302, Location="/v2/ai/tiny/manifests/latest"), "redirects in a circle"),
        ("blobs/", body(b"x"), "bytes at its source, where"),
        ("blobs/", body(gguf(SIZE, seed=9)), "damaged twice|bytes at its source"),
        ("blobs/", endless, "damaged twice|bytes at its source"),
        ("blobs/", trickle, "sent less than|damaged twice"),
        ("blobs/", status(429, Retry_After="3600"), "answered 429"),
    ],
)
async def test_a_pull_ends_in_words(
    fake: FakeRegistry, machine: Machine, where: str, answer: Answer, said: str
) -> None:
    fake.on(f"GET .*{where}", answer)
    with pytest.raises(ModelRunnerError, match=said) as raised:
        await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)
    assert str(raised.value).isprintable()
    assert machine.store.list() == []


def gigabyte(kind: bytes) -> bytes:
    """A tar with one file of a gigabyte, in a megabyte."""
    member = tarfile.TarInfo("config.json")
    member.size, member.type = 1 << 30, kind
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    pieces = (member.tobuf(tarfile.GNU_FORMAT), *[bytes(1 << 20)] * 1024)
    return b"".join(map(packer.compress, pieces)) + packer.flush()


@pytest.mark.parametrize("bomb", ["endless", "gzip", "layers", "deep", "archive", "long name"])
async def test_bombs_take_little_memory(fake: FakeRegistry, machine: Machine, bomb: str) -> None:
    """At most the largest manifest, of 4 MiB, and 64 MiB."""
    many = b'{"schemaVersion": 2, "layers": [%s]}' % b",".join([b"{}"] * 100_000)
    manifests = {"endless": endless, "layers": body(many), "deep": body(b'{"a":' * 700_000)}
    if bomb == "gzip":
        manifests["gzip"] = body(gigabyte(tarfile.REGTYPE), Content_Encoding="gzip")
    if bomb in manifests:
        fake.on("GET .*manifests/", manifests[bomb])
    else:
        packed = gigabyte({"archive": tarfile.REGTYPE, "long name": tarfile.GNUTYPE_LONGNAME}[bomb])
        layers = [(f"{CNCF}weight.config.v1.tar+gzip", packed, NOTHING)]
        fake.models["ai/tiny"] = artifact(modelpack_config("safetensors", layers), f"{CNCF}config.v1+json", layers)
    tracemalloc.start()
    try:
        with pytest.raises(ModelRunnerError, match=r"more than|unpacks to more|a header of|cannot be parsed"):
            await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)
        assert tracemalloc.get_traced_memory()[1] < 68 << 20
    finally:
        tracemalloc.stop()
    assert sum(path.stat().st_size for path in machine.store.data.rglob("*") if path.is_file()) < 70 << 20


async def test_a_busy_registry_is_asked_again(fake: FakeRegistry, machine: Machine) -> None:
    fake.on("GET .*manifests", first(status(429, Retry_After="1"), 2))
    fake.on("GET .*blobs", first(status(503), 3))
    assert (await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)).id == fake.models["ai/tiny"].id


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/",
        "https://169.254.169.254/latest/meta-data/",
        "http://10.0.0.1/",
        "https://192.168.0.1/",
        "https://[fd00::1]/",
        "https://[::ffff:127.0.0.1]:1/",
        "https://localhost:1/",
        "http://example.com/",
        "file:///etc/passwd",
    ],
)
@pytest.mark.parametrize("where", ["manifests/", "blobs/"])
async def test_a_redirect_to_where_nobody_pointed(
    fake: FakeRegistry, machine: Machine, where: str, location: str
) -> None:
    fake.on(f"GET .*{where}", status(307, Location=location))
    with pytest.raises(SourceFailed):
        await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)
    assert machine.store.list() == []


@pytest.mark.parametrize("named", [False, True])
async def test_a_redirect_to_a_host_that_was_named_carries_no_password(
    fake: FakeRegistry, other: FakeRegistry, tmp_path: Path, named: bool
) -> None:
    other.models = fake.models

    async def guarded(request: web.Request) -> web.StreamResponse | None:
        if request.headers.get("Authorization") != ADA.basic:
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})
        if "/blobs/" in request.path:
            return web.Response(status=307, headers={"Location": f"http://{other.host}{request.path}"})
        return None

    fake.on("GET", guarded)
    rules = RegistryRules(hosts=(other.host,)) if named else RegistryRules()
    machine = Machine(tmp_path / "m", {fake.host: rules}, IMPATIENT)
    machine.credentials.store(fake.host, ADA)
    if named:
        await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)
        assert {secret for _, _, secret in other.seen} == {""}
    else:
        with pytest.raises(SourceFailed, match=r"without TLS|not a public address"):
            await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)
        assert other.seen == []


def asks_for_tokens(fake: FakeRegistry, realm: str, wanted: str = "a-token") -> None:
    async def guarded(request: web.Request) -> web.StreamResponse | None:
        if request.headers.get("Authorization") == f"Bearer {wanted}":
            return None
        told = f'Bearer realm="{realm}",service="tests",scope="repository:somewhere/else:*"'
        return web.Response(status=401, headers={"WWW-Authenticate": told})

    fake.on("GET /v2/", guarded)


async def test_a_token_service_on_the_registrys_own_origin(fake: FakeRegistry, machine: Machine) -> None:
    asks_for_tokens(fake, f"http://{fake.host}/token?account=x")
    fake.on("GET /token", body(b'{"token": "a-token"}'))
    machine.credentials.store(fake.host, ADA)
    await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)
    asked = [(path, secret) for _, path, secret in fake.seen if path.startswith("/token")]
    assert asked == [("/token?account=x&scope=repository%3Aai%2Ftiny%3Apull&service=tests", ADA.basic)]


@pytest.mark.parametrize("named", [False, True])
async def test_a_token_service_elsewhere_gets_no_password(
    fake: FakeRegistry, other: FakeRegistry, tmp_path: Path, named: bool
) -> None:
    asks_for_tokens(fake, f"http://{other.host}/token")
    other.on("GET /token", body(b'{"access_token": "a-token"}'))
    rules = RegistryRules(token_hosts=(other.host,)) if named else RegistryRules()
    machine = Machine(tmp_path / "m", {fake.host: rules}, IMPATIENT)
    machine.credentials.store(fake.host, ADA)
    if named:
        await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)
        assert [secret for _, _, secret in other.seen] == [ADA.basic]
    else:
        with pytest.raises(SourceFailed, match="token_hosts") as raised:
            await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)
        assert ADA.password not in str(raised.value)
        machine.credentials.forget(fake.host)  # and without a password no private address is asked either
        with pytest.raises(SourceFailed, match=r"without TLS|not a public address"):
            await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)
        assert other.seen == []


@pytest.mark.parametrize(
    "realm", ["", "/token", "ftp://x/", "https://a:b@c/", "http://169.254.169.254/", "https://10.0.0.1/"]
)
async def test_a_token_service_whose_address_is_none(fake: FakeRegistry, machine: Machine, realm: str) -> None:
    asks_for_tokens(fake, realm)
    with pytest.raises(SourceFailed):
        await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)


@pytest.mark.parametrize("answer", [b"{}", b"[]", b'{"token": "a\\r\\nX-Evil: 1"}', b'{"token": 5}', b"\xff"])
async def test_a_token_that_is_none(fake: FakeRegistry, machine: Machine, answer: bytes) -> None:
    asks_for_tokens(fake, f"http://{fake.host}/token")
    fake.on("GET /token", body(answer))
    with pytest.raises(SourceFailed, match="gave no token"):
        await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)


async def test_a_token_that_runs_out_is_renewed_and_the_download_goes_on(fake: FakeRegistry, machine: Machine) -> None:
    issued = 0

    async def token(request: web.Request) -> web.StreamResponse:
        nonlocal issued
        issued += 1
        return web.json_response({"token": f"token-{issued}"})

    async def guarded(request: web.Request) -> web.StreamResponse | None:
        good = request.headers.get("Authorization") == f"Bearer token-{issued}" and issued >= 2
        if "/manifests/" in request.path and issued:
            return None
        told = f'Bearer realm="http://{fake.host}/token"'
        return None if good else web.Response(status=401, headers={"WWW-Authenticate": told})

    fake.on("GET /token", token)
    fake.on("GET /v2/", guarded)
    await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)
    assert issued == 2


def test_challenges() -> None:
    header = 'Basic realm="a, b", Bearer realm="https://x/t?a=b",service="s \\" q" , scope=a:b:pull,push , Negotiate'
    found = challenges(header)
    assert [challenge.scheme for challenge in found][:2] == ["basic", "bearer"]
    assert found[0].parameters == {"realm": "a, b"}
    assert found[1].parameters["service"] == 's " q'
    assert challenges("=" * 10_000) == []


def changed(change: Callable[[dict[str, bytes]], None]) -> Artifact:
    files = {"config.json": b"{}"}
    change(files)
    layers = [(f"{CNCF}weight.config.v1.tar", artifacts.tar(files), NOTHING)]
    return artifact(modelpack_config("safetensors", layers), f"{CNCF}config.v1+json", layers)


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "a/..", "x\ny", "\x1b[31m", "é" * 1100])
async def test_an_archive_with_names_that_lead_elsewhere(fake: FakeRegistry, machine: Machine, name: str) -> None:
    fake.models["ai/tar"] = changed(lambda files: files.update({name: b"x"}))
    with pytest.raises(InvalidModel, match="leads out of the folder") as raised:
        await machine.puller.pull(f"{fake.host}/ai/tar", ignore)
    assert str(raised.value).isprintable()
    assert list(machine.store.partial.iterdir()) == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"S", b"?"])
def test_an_archive_with_anything_but_files(kind: bytes) -> None:
    member = tarfile.TarInfo("config.json")
    member.type, member.linkname = kind, "/etc/passwd"
    with pytest.raises(InvalidModel, match="link or a device"):
        list(tar.members(io.BytesIO(member.tobuf() + bytes(1024)), limit=1 << 20))


def test_an_archive_that_is_too_large_or_damaged() -> None:
    whole = artifacts.tar({"a": b"x" * 600, "b": b"y"})
    names = [(member.name, member.content(1000)) for member in tar.members(io.BytesIO(whole), limit=1000)]
    assert names == [("a", b"x" * 600), ("b", b"y")]
    with pytest.raises(InvalidModel, match="unpacks to more"):
        list(tar.members(io.BytesIO(whole), limit=600))
    for cut in (100, 512, 1500, 2100):
        with pytest.raises(InvalidModel):
            list(tar.members(io.BytesIO(whole[:cut]), limit=1000))
    with pytest.raises(InvalidModel, match="twice"):
        list(tar.members(io.BytesIO(artifacts.tar({"a": b"", "A": b""})), limit=1000))
    with pytest.raises(InvalidModel, match="not a tar"):
        list(tar.members(io.BytesIO(b"x" * 1024), limit=1000))
    huge = tarfile.TarInfo("PaxHeaders/x")
    huge.type, huge.size = b"x", 1 << 40
    with pytest.raises(InvalidModel, match="a header of"):
        list(tar.members(io.BytesIO(huge.tobuf(tarfile.GNU_FORMAT)), limit=1000))
    many = b"".join(tarfile.TarInfo(f"d{n}").tobuf() for n in range(10_001))
    with pytest.raises(InvalidModel, match="more than 10000"):
        list(tar.members(io.BytesIO(many), limit=1000))


def header(kind: bytes, data: bytes) -> bytes:
    """A header of a tar that is no file's, with its content."""
    member = tarfile.TarInfo("PaxHeaders/x")
    member.type, member.size = kind, len(data)
    return member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tar.BLOCK)


@pytest.mark.parametrize("kind", [b"x", b"g", b"L"])
def test_headers_of_no_file_do_not_add_up(kind: bytes) -> None:
    with pytest.raises(InvalidModel, match="more than 8 headers before one file"):
        list(tar.members(io.BytesIO(header(kind, b"") * 200 + A), limit=1000))
    whole = (header(kind, b"b" * 600 if kind == b"L" else b"12 a=123456\n" * 50) + A) * 2
    with pytest.raises(InvalidModel, match="more than 1000 bytes"):
        list(tar.members(io.BytesIO(whole), limit=1000))


def test_a_later_header_of_a_kind_replaces_the_one_before() -> None:
    headers = header(b"x", b"11 path=aa\n10 size=1\n") + header(b"L", b"b\0") + header(b"x", b"11 mtime=1\n")
    assert [(member.name, member.size) for member in tar.members(io.BytesIO(headers + A), limit=99)] == [("b", 0)]
    headers = header(b"L", b"b\0") + header(b"x", b"11 path=aa\n")
    assert [member.name for member in tar.members(io.BytesIO(headers + A + A), limit=99)] == ["aa", "a"]


@pytest.mark.parametrize("record", [b"5 a=\n", b"1" * 600, b"9 a=\n", b"0 a=\n", b" a=\n"])
def test_records_take_little_time(record: bytes) -> None:
    whole = (header(b"x", (record * 20_000)[:65_000]) + A) * 100
    with pytest.raises(InvalidModel):
        list(tar.members(io.BytesIO(whole), limit=1 << 30))

    def read() -> None:
        with contextlib.suppress(InvalidModel):
            list(tar.members(io.BytesIO(whole), limit=1 << 30))

    assert cost(read) < 5


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_archives_with_long_names_and_attributes_are_read(format: int) -> None:
    names = [f"{'folder/' * 40}{n}.json" for n in range(100)]
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format, pax_headers={"comment": "x"}) as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uname = 3, 1.5, "é"
            member.pax_headers = {f"SCHILY.xattr.user.{n}": "y" * 99 for n in range(20)}
            archive.addfile(member, io.BytesIO(b"abc"))
    file.seek(0)
    read = [(member.name, member.content(3)) for member in tar.members(file, limit=1 << 20)]
    assert read == [(name, b"abc") for name in names]


async def test_names_in_annotations_never_become_paths(fake: FakeRegistry, machine: Machine) -> None:
    model = gguf()
    path = "org.cncf.model.filepath"
    layers = [
        (f"{DOCKER}gguf.v3", model, {path: "../../../../etc/cron.d/x"}),
        (f"{DOCKER}model.file", b"x", {path: "/x"}),
    ]
    fake.models["ai/paths"] = artifact(docker_config("gguf", layers), V1, layers)
    pulled = await machine.puller.pull(f"{fake.host}/ai/paths", ignore)
    assert list(machine.store.bundle(pulled.id).files) == ["model.gguf"]
    assert sorted(p.name for p in machine.folder.iterdir()) == ["data"]


async def test_a_manifest_with_too_many_layers(fake: FakeRegistry, machine: Machine) -> None:
    layers = [(f"{DOCKER}gguf.v3", b"x", NOTHING)] * 5000
    fake.models["ai/many"] = artifact(docker_config("gguf", []), V1, layers)
    with pytest.raises(InvalidModel, match="5000 layers"):
        await machine.puller.pull(f"{fake.host}/ai/many", ignore)


async def test_a_model_with_code_is_refused_before_its_weights_come(fake: FakeRegistry, machine: Machine) -> None:
    weights = struct.pack("<Q", 2) + b"{}" + bytes(17 << 20)
    files = {"config.json": b'{"auto_map": {}}', "model.safetensors": weights}
    layers = [(f"{DOCKER}model.file", data, {"org.cncf.model.filepath": name}) for name, data in files.items()]
    fake.models["ai/code"] = artifact(docker_config("safetensors", layers), V1, layers)
    with pytest.raises(ModelRunnerError, match="carries code"):
        await machine.puller.pull(f"{fake.host}/ai/code", ignore)
    assert len([path for _, path, _ in fake.seen if "/blobs/" in path]) == 2


async def test_a_download_that_was_cut_goes_on_in_the_next_daemon(
    fake: FakeRegistry, machine: Machine, tmp_path: Path
) -> None:
    data = gguf(SIZE)

    async def cut(request: web.Request) -> web.StreamResponse | None:
        if request.path.endswith(tuple(fake.models["ai/tiny"].blobs)[1]) and "Range" not in request.headers:
            response = web.StreamResponse()
            response.content_length = len(data)
            await response.prepare(request)
            await response.write(data[: SIZE // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        ranges.append(request.headers.get("Range", ""))
        if "Range" in request.headers and not resumed:
            return web.Response(status=503, headers={"Retry-After": "3600"})
        return None

    resumed, ranges = False, list[str]()
    fake.on("GET .*blobs", cut)
    with pytest.raises(SourceFailed, match="pull to go on"):
        await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)
    resumed, asked = True, len(ranges)
    assert ranges[-1] > "bytes=0-"
    again = Machine(machine.folder, manner=IMPATIENT)
    await again.puller.pull(f"{fake.host}/ai/tiny", ignore)
    assert again.store.bundle(f"{fake.host}/ai/tiny").model_file.read_bytes() == data
    assert ranges[asked - 1] in ranges[asked:], "from where the first one would have gone on, however much had come"


async def test_a_name_that_is_not_there_says_what_to_do(fake: FakeRegistry, machine: Machine) -> None:
    with pytest.raises(ModelNotFound, match="look at its name, or log in"):
        await machine.puller.pull(f"{fake.host}/ai/none", ignore)
