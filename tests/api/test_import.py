"""Models of other programs: what is listed, and that nothing of theirs is changed."""

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelrunner.pull import linking
from tests.api.conftest import Daemon, StartDaemon
from tests.pull.models import adapter
from tests.store.folders import model_files, write
from tests.store.samples import write_gguf
from tests.waiting import HUNG

HEADERS = {"Accept": "application/json"}


def hugging_face(root: Path) -> Path:
    """A repository with a GGUF file and one with a folder, as huggingface_hub caches them; returns the GGUF's blob."""
    for repository, files in (("models--Org--Some-GGUF", None), ("models--org--folder", model_files())):
        snapshot = root / repository / "snapshots" / ("ab" * 20)
        blobs = root / repository / "blobs"
        for folder in (snapshot, blobs, root / repository / "refs"):
            folder.mkdir(parents=True)
        (root / repository / "refs/main").write_text("ab" * 20)
        if files is None:
            write_gguf(blobs / "weights", seed=1)
            (snapshot / "some-Q4_K_M.gguf").symlink_to("../../blobs/weights")
        else:
            write(snapshot, files)
    (root / "models--broken").mkdir()
    (root / "datasets--a--b").mkdir()
    return root / "models--Org--Some-GGUF/blobs/weights"


def ollama(root: Path) -> Path:
    path = write_gguf(root.parent / "ollama.gguf", seed=2)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (root / "blobs").mkdir(parents=True)
    path.rename(root / "blobs" / f"sha256-{digest}")
    manifest = root / "manifests/registry.ollama.ai/library/tiny/7b"
    manifest.parent.mkdir(parents=True)
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": 1}]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    manifest.with_name("odd").write_text("[1]")
    manifest.with_name("deep").write_text("[" * 100_000)
    evil = [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../etc/passwd"}]
    manifest.with_name("evil").write_text(json.dumps({"layers": evil}))
    return root / "blobs" / f"sha256-{digest}"


def carried(root: Path, **texts: str) -> None:
    """Ollama's model `tiny:carries`: that one with further layers, whose kinds and texts are given."""
    manifest = root / "manifests/registry.ollama.ai/library/tiny/7b"
    found = json.loads(manifest.read_text())
    for kind, text in texts.items():
        digest = hashlib.sha256(text.encode()).hexdigest()
        (root / "blobs" / f"sha256-{digest}").write_text(text)
        kind = f"application/vnd.ollama.image.{kind}"
        found["layers"].append({"mediaType": kind, "digest": f"sha256:{digest}", "size": len(text)})
    manifest.with_name("carries").write_text(json.dumps(found))


def lm_studio(root: Path) -> Path:
    (root / "Maker/Thing").mkdir(parents=True)
    write_gguf(root / "Maker/Thing/mmproj-thing.gguf", architecture="clip")
    return write_gguf(root / "Maker/Thing/thing-q8_0.gguf", seed=3)


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The model file of each program, under the name that the model gets."""
    return fill(tmp_path / "home", monkeypatch)


def fill(home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "ollama"))
    return {
        "hf.co/org/some-gguf:SOME-Q4_K_M": hugging_face(home / "hub"),
        "registry.ollama.ai/library/tiny:7b": ollama(home / "ollama"),
        "hf.co/maker/thing:THING-Q8_0": lm_studio(home / ".lmstudio/models"),
    }


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """What must not change: content, mode, owner, times."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in folder.rglob("*"):
        told = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (told.st_mode, told.st_uid, told.st_mtime_ns, told.st_ino, content)
    return found


async def listed(daemon: Daemon) -> dict[str, dict[str, Any]]:
    async with daemon.unix.get("/models/import") as answer:
        assert answer.status == 200
        return {model["name"]: model for model in await answer.json()}


async def take(daemon: Daemon, model: str, **options: str) -> dict[str, Any]:
    async with daemon.unix.post("/models/import", json={"model": model, **options}, headers=HEADERS) as answer:
        return dict(json.loads((await answer.text()).splitlines()[-1]))


async def test_what_is_there_is_listed_with_its_cost(start_daemon: StartDaemon, theirs: dict[str, Path]) -> None:
    daemon = await start_daemon()
    found = await listed(daemon)
    assert found.keys() == {*theirs, "hf.co/org/folder"}
    assert {model["cost"] for model in found.values()} <= {"hard link", "reflink"}
    assert (
        found["registry.ollama.ai/library/tiny:7b"]["size"]
        == os.stat(theirs["registry.ollama.ai/library/tiny:7b"]).st_size
    )
    assert {model["program"] for model in found.values()} == {"Hugging Face", "Ollama", "LM Studio"}
    assert list((daemon.settings.data_dir / "partial").iterdir()) == []


async def test_a_model_is_taken_without_a_change_to_theirs(
    start_daemon: StartDaemon, theirs: dict[str, Path], tmp_path: Path
) -> None:
    daemon = await start_daemon()
    before = snapshot(tmp_path / "home")
    for name, path in theirs.items():
        done = await take(daemon, name)
        assert (done["type"], done["model"]) == ("success", name), done
        blob = daemon.settings.data_dir / "blobs/sha256" / hashlib.sha256(path.read_bytes()).hexdigest()
        assert blob.samefile(path) or "reflink" in done["message"]
    assert (await take(daemon, "org/folder", name="mine"))["model"] == "mine"
    assert {name for name, model in (await listed(daemon)).items() if model["here"]} == set(theirs)
    for name in (*theirs, "mine"):
        async with daemon.unix.post(f"/models/{name.replace('/', '%2F')}/verify", headers=HEADERS) as answer:
            assert json.loads((await answer.text()).splitlines()[-1])["type"] == "success"
    async with daemon.unix.get("/models/thing") as answer:
        assert "vision" in (await answer.json())["capabilities"]
    for name in (*theirs, "mine"):
        async with daemon.unix.delete(f"/models/{name.replace('/', '%2F')}") as answer:
            assert answer.status == 200
    assert snapshot(tmp_path / "home") == before


async def test_what_a_model_of_ollama_carries_comes_along(
    start_daemon: StartDaemon, theirs: dict[str, Path], tmp_path: Path
) -> None:
    carried(
        tmp_path / "home/ollama",
        system="You are Mario.",
        params='{"temperature": 0.5, "stop": ["END"], "num_ctx": 512, "num_gpu": 9}',
        messages='[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]',
        license="MIT License",
        template="{{ .System }} {{ .Prompt }}",
    )
    daemon = await start_daemon()
    assert (await take(daemon, "tiny:carries", name="mario"))["type"] == "success"
    async with daemon.unix.get("/models/mario/show") as answer:
        shown = await answer.json()
    assert (shown["system"], shown["license"], shown["context_size"]) == ("You are Mario.", ["MIT License"], 512)
    assert shown["parameters"] == {"temperature": 0.5, "stop": ["END"]}
    assert [message["content"] for message in shown["messages"]] == ["1+1?", "2"]
    assert ".Prompt" not in shown["template"]
    for wrong in ({"params": "[1]"}, {"messages": "{"}, {"params": '{"temperature": "hot"}'}):
        carried(tmp_path / "home/ollama", **wrong)
        assert (await take(daemon, "tiny:carries", name="wrong"))["error"]["code"] in ("invalid_model", "bad_request")


async def test_their_files_may_be_links_and_a_fifo_is_not_waited_for(
    start_daemon: StartDaemon, theirs: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "home/ollama"
    carried(root, system="Be kind.")
    for kept in [*(root / "blobs").iterdir(), root / "manifests/registry.ollama.ai/library/tiny/carries"]:
        moved = kept.rename(tmp_path / kept.name)
        kept.symlink_to(moved)
    os.mkfifo(root / "manifests/registry.ollama.ai/library/tiny/fifo")
    for name in ("models--Org--Some-GGUF", "models--broken"):
        main = tmp_path / "home" / "hub" / name / "refs/main"
        main.parent.mkdir(exist_ok=True)
        main.unlink(missing_ok=True)
        os.mkfifo(main)
    daemon = await start_daemon()
    async with asyncio.timeout(HUNG):
        assert (await take(daemon, "tiny:carries", name="kind"))["type"] == "success"


async def test_odd_files_hide_no_model(start_daemon: StartDaemon, theirs: dict[str, Path], tmp_path: Path) -> None:
    """A power cut, a restore from a backup and a careless `ln` leave such files."""
    daemon = await start_daemon()
    before = await listed(daemon)
    assert len(before) > 2
    [hub] = {path for path in tmp_path.rglob("hub") if path.is_dir()}
    [manifests] = {path for path in tmp_path.rglob("library") if path.is_dir()}
    for name, text in (("zeros", b"\0" * 40), ("long", b"a" * 900), ("latin", b"\xe9"), ("up", b"..")):
        (refs := hub / f"models--odd--{name}/refs").mkdir(parents=True)
        (refs / "main").write_bytes(text)
    loop = hub / "models--odd--loop"
    (loop / "refs").mkdir(parents=True)
    (loop / "refs/main").symlink_to("main")
    (loop / "snapshots").symlink_to("snapshots")
    (manifests / "loop").mkdir()
    (manifests / "loop/latest").symlink_to("latest")
    strange = os.fsdecode(os.fsencode(hub) + b"/models--odd--\xff")
    shutil.copytree(hub / "models--Org--Some-GGUF", strange, symlinks=True)
    inside = os.fsencode(hub / "models--Org--Some-GGUF/snapshots" / ("ab" * 20))
    os.symlink("../../blobs/weights", inside + b"/\xff-Q8_0.gguf")
    os.symlink("x.gguf", inside + b"/x.gguf")
    assert await listed(daemon) == before


async def test_an_adapter_of_ollama_comes_along(
    start_daemon: StartDaemon, theirs: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "home/ollama"
    carried(root, adapter="")
    data = adapter()
    (root / "blobs" / f"sha256-{hashlib.sha256(data).hexdigest()}").write_bytes(data)
    manifest = root / "manifests/registry.ollama.ai/library/tiny/carries"
    empty, whole = hashlib.sha256(b"").hexdigest(), hashlib.sha256(data).hexdigest()
    manifest.write_text(manifest.read_text().replace(empty, whole))
    daemon = await start_daemon()
    assert (await take(daemon, "tiny:carries", name="styled"))["type"] == "success"
    async with daemon.unix.get("/models/styled") as answer:
        assert len((await answer.json())["adapters"]) == 1


async def test_a_change_on_their_side_is_found(start_daemon: StartDaemon, theirs: dict[str, Path]) -> None:
    daemon = await start_daemon()
    name, path = "registry.ollama.ai/library/tiny:7b", theirs["registry.ollama.ai/library/tiny:7b"]
    if "hard link" not in (await take(daemon, name))["message"]:
        pytest.skip("this file system clones: a change on their side stays there")
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    async with daemon.unix.post(f"/models/{name.replace('/', '%2F')}/verify", headers=HEADERS) as answer:
        last = json.loads((await answer.text()).splitlines()[-1])
    assert "missing or damaged files" in last["message"]


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder on another file system."""
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == os.stat(tempfile.gettempdir()).st_dev:
        pytest.skip("there is no second file system")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


async def test_a_model_of_another_file_system_is_copied(
    start_daemon: StartDaemon, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = fill(elsewhere, monkeypatch)
    daemon = await start_daemon()
    before = snapshot(elsewhere)
    assert {model["cost"] for model in (await listed(daemon)).values()} == {"copy"}
    done = await take(daemon, "tiny")
    assert "by copy from Ollama" in done["message"]
    digest = hashlib.sha256(theirs["registry.ollama.ai/library/tiny:7b"].read_bytes()).hexdigest()
    assert (daemon.settings.data_dir / "blobs/sha256" / digest).stat().st_mode & 0o777 == 0o444
    assert snapshot(elsewhere) == before


@pytest.mark.parametrize(("model", "status"), [("nothing", 404), ("hf.co", 400)])
async def test_a_wrong_name_is_told(
    start_daemon: StartDaemon, theirs: dict[str, Path], model: str, status: int
) -> None:
    daemon = await start_daemon()
    async with daemon.unix.post("/models/import", json={"model": model}) as answer:
        assert answer.status == status


async def test_nobody_sees_them_over_tcp(start_daemon: StartDaemon, theirs: dict[str, Path]) -> None:
    daemon = await start_daemon()
    async with daemon.tcp.get("/models/import") as answer:
        assert answer.status == 403
    async with daemon.tcp.post("/models/import", json={"model": "tiny"}) as answer:
        assert answer.status == 403
    source = theirs["registry.ollama.ai/library/tiny:7b"].as_uri()
    async with daemon.tcp.post("/models/create", json={"from": source, "name": "x"}) as answer:
        assert answer.status == 403


def test_a_file_that_cannot_be_linked_is_left_to_a_copy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    assert linking.link_kind(tmp_path / "file", tmp_path / "absent") is linking.LinkKind.COPY
    assert linking.link_kind(tmp_path / "absent", tmp_path) is linking.LinkKind.COPY
    assert linking.link_kind(tmp_path / "file", tmp_path) is not linking.LinkKind.COPY
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
