"""`save` and `load`: models as archives, ours and those of others."""

import asyncio
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from modelrunner.errors import BadRequest, InsufficientDisk, InvalidModel, StorageFailed, UnsupportedModel
from modelrunner.pull import Puller, PullResult
from modelrunner.pull.loading import LoadOptions
from modelrunner.store import Store
from modelrunner.store.layout import archive_of
from tests.oci.artifacts import published
from tests.oci.registry import Artifact
from tests.pull.models import gguf
from tests.store.folders import add_folder, model_files
from tests.store.samples import add_model, files_under

Files = dict[str, bytes]


async def pieces(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def load(store: Store, data: bytes, options: LoadOptions | None = None, size: int = 100_000) -> list[PullResult]:
    return await Puller(store).load(pieces(data, size), lambda step: None, options or LoadOptions())


def saved(store: Store, name: str) -> bytes:
    archive = archive_of(store, name)
    data = b"".join(archive.pieces())
    assert len(data) == archive.size
    return data


def unpacked(data: bytes) -> Files:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def packed(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def blob(data: bytes) -> tuple[str, bytes]:
    return f"blobs/sha256/{hashlib.sha256(data).hexdigest()}", data


def layout(artifact: Artifact, annotations: Mapping[str, str]) -> bytes:
    """As skopeo lays an artifact out: the index last."""
    described = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": artifact.id,
        "size": len(artifact.manifest),
        "annotations": annotations,
    }
    index = json.dumps({"schemaVersion": 2, "manifests": [described]}).encode()
    blobs = dict(map(blob, [artifact.manifest, *artifact.blobs.values()]))
    return packed(blobs | {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": index})


@pytest.mark.parametrize("size", [1, 511, 1 << 20])
async def test_saved_and_loaded_elsewhere(store: Store, tmp_path: Path, size: int) -> None:
    model = add_folder(store, "hf.co/org/model", model_files())
    data = saved(store, "hf.co/org/model")
    other = Store(tmp_path / "other")
    assert await load(other, data, size=size) == [PullResult(model.id, "hf.co/org/model")]
    assert other.manifest(model.id) == store.manifest(model.id)
    assert other.verify(model.id) == ()
    assert {name: path.read_bytes() for name, path in other.bundle(model.id).files.items()} == model_files()
    assert list(other.partial.iterdir()) == []


def test_the_same_model_gives_the_same_bytes(store: Store, tmp_path: Path) -> None:
    other = Store(tmp_path / "other")
    for each, names in ((store, list(model_files())), (other, list(reversed(model_files())))):
        add_folder(each, "m", {name: model_files()[name] for name in names})
        for path in each.partial.parent.rglob("*"):
            os.utime(path, (len(names), hash(path) % 10**9), follow_symlinks=False)
    assert saved(store, "m") == saved(other, "m")


@pytest.mark.parametrize("kind", published())
async def test_each_layout_that_others_publish(store: Store, kind: str) -> None:
    artifact, files = published()[kind]
    (loaded,) = await load(store, layout(artifact, {"org.opencontainers.image.ref.name": "x/y:v1"}))
    assert loaded == PullResult(artifact.id, "x/y:v1")
    assert {name: path.read_bytes() for name, path in store.bundle("x/y:v1").files.items()} == files


async def test_of_docker_model_runner(store: Store) -> None:
    """Its archives have the manifest itself, and no name."""
    artifact, _ = published()["docker v0.1, GGUF"]
    archive = packed({"manifest.json": artifact.manifest} | dict(map(blob, artifact.blobs.values())))
    assert await load(store, archive) == [PullResult(artifact.id, artifact.id)]
    assert await load(store, archive, LoadOptions("named")) == [PullResult(artifact.id, "named")]
    assert store.get("named").id == artifact.id


def skopeo(*arguments: str) -> None:
    result = subprocess.run(["skopeo", "--insecure-policy", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


async def test_skopeo_reads_ours_and_we_read_skopeos(store: Store, tmp_path: Path) -> None:
    model = add_model(store, "host.example/team/model:v1")
    (tmp_path / "ours.tar").write_bytes(saved(store, "host.example/team/model:v1"))
    theirs = tmp_path / "theirs.tar"
    target = f"oci-archive:{theirs}:host.example/team/model:v2"
    await asyncio.to_thread(skopeo, "copy", "--preserve-digests", f"oci-archive:{tmp_path / 'ours.tar'}", target)
    other = Store(tmp_path / "other")
    assert await load(other, theirs.read_bytes()) == [PullResult(model.id, "host.example/team/model:v2")]


async def test_what_is_here_is_not_written_again(store: Store) -> None:
    model = add_model(store, "m", vocabulary=1000)
    data = saved(store, "m")
    store.tag("m", "kept")
    inodes = {path: path.stat().st_ino for path in (store.data / "blobs/sha256").iterdir()}
    assert (await load(store, data, LoadOptions("again")))[0].id == model.id
    assert {path: path.stat().st_ino for path in (store.data / "blobs/sha256").iterdir()} == inodes
    next(path for path in inodes if path.stat().st_size > 10_000).unlink()
    assert len(store.missing("m")) == 1
    await load(store, data)  # which heals it
    assert store.missing("m") == store.verify("m") == ()


def without(part: str) -> Callable[[Files], Files]:
    return lambda files: {name: data for name, data in files.items() if part not in name}


def flipped(files: Files) -> Files:
    name = max(files, key=lambda each: len(files[each]))
    return files | {name: files[name][:-1] + bytes([files[name][-1] ^ 1])}


def with_document(name: str, data: bytes) -> Callable[[Files], Files]:
    """The manifest or the configuration is replaced by `data`, and what names it names that."""

    def replaced(files: Files) -> Files:
        index = json.loads(files["index.json"])
        manifest = json.loads(files.pop(place(index["manifests"][0]["digest"])))
        if name == "configuration":
            files.pop(place(manifest["config"]["digest"]))
            manifest["config"] |= {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}
            files |= dict([blob(data)])
        content = data if name == "manifest" else json.dumps(manifest).encode()
        index["manifests"][0]["digest"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
        return files | dict([blob(content)]) | {"index.json": json.dumps(index).encode()}

    return replaced


def place(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


DEEP = b'{"config": {"a": ' + b"[" * 100_000
HOSTILE: dict[str, Callable[[Files], Files]] = {
    "another content": flipped,
    "no models": without("index.json"),
    "lacks its file": without("blobs"),
    "leads out of the folder": lambda files: {"../up": b"", **files},
    "index cannot be parsed": lambda files: files | {"index.json": b"[1]"},
    "names 0 models": lambda files: files | {"index.json": b'{"manifests": []}'},
    "index cannot be parsed .*codec": lambda files: files | {"index.json": b'{"manifests":[{"mediaType":"\xff"}]}'},
    "manifest cannot be parsed .*recursion": with_document("manifest", DEEP),
    "manifest cannot be parsed .*codec": with_document("manifest", b'{"schemaVersion":2,"mediaType":"\xff"}'),
    "configuration cannot be parsed .*recursion": with_document("configuration", DEEP),
    "configuration cannot be parsed .*codec": with_document("configuration", b'{"config":{"a":"\xff"}}'),
    "64 lower-case": lambda files: files | {"index.json": b'{"manifests":[{"mediaType":"x","digest":"sha256:../x"}]}'},
    "twice": lambda files: (
        {f"x/../{name}".removeprefix("x/../"): data for name, data in files.items()} | {"BLOBS": b"", "blobs": b""}
    ),
}


@pytest.mark.parametrize("said", HOSTILE)
async def test_a_hostile_archive_leaves_nothing(store: Store, tmp_path: Path, said: str) -> None:
    add_model(store, "m")
    data = packed(HOSTILE[said](unpacked(saved(store, "m"))))
    other = Store(tmp_path / "other")
    before = files_under(other.data)
    with pytest.raises(InvalidModel, match=said) as raised:
        await load(other, data)
    assert str(raised.value).isprintable()
    assert files_under(other.data) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "other"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
async def test_links_and_devices_are_refused(store: Store, kind: bytes) -> None:
    member = tarfile.TarInfo(f"blobs/sha256/{'a' * 64}")
    member.type, member.linkname = kind, "/etc/passwd"
    with pytest.raises(InvalidModel, match="link or a device"):
        await load(store, member.tobuf() + bytes(1024))


async def test_a_size_that_lies_takes_no_space(store: Store) -> None:
    member = tarfile.TarInfo(f"blobs/sha256/{'a' * 64}")
    member.size = 1 << 49
    with pytest.raises(InsufficientDisk, match="not enough room"):
        await load(store, member.tobuf(tarfile.GNU_FORMAT) + b"x" * 10_000)
    member.size = 1 << 20
    with pytest.raises(InvalidModel, match="ends in the middle"):
        await load(store, member.tobuf() + b"x" * 10_000)
    assert list(store.partial.iterdir()) == []
    store.quota = 1000
    with pytest.raises(InsufficientDisk, match="models_quota"):
        await load(store, member.tobuf() + b"x" * 10_000)


async def test_an_archive_cut_anywhere(store: Store, tmp_path: Path) -> None:
    add_model(store, "m")
    data = saved(store, "m")
    other = Store(tmp_path / "other")
    for cut in range(0, len(data) - 1024, 997):
        with pytest.raises(InvalidModel):
            await load(other, data[:cut])
    assert other.list() == []
    assert list(other.partial.iterdir()) == []


async def test_a_client_that_leaves_leaves_nothing(store: Store, tmp_path: Path) -> None:
    add_model(store, "m")
    data = saved(store, "m")
    other = Store(tmp_path / "other")
    reached, never = asyncio.Event(), asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield data[: len(data) // 2]
        reached.set()
        await never.wait()

    task = asyncio.create_task(Puller(other).load(half(), lambda step: None, LoadOptions()))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(other.partial.iterdir()) == []
    assert other.list() == []


async def test_code_is_taken_only_where_it_is_trusted(store: Store, tmp_path: Path) -> None:
    files = model_files(auto_map={"AutoModel": "modeling.M"}) | {"modeling.py": b"class M: ..."}
    model = add_folder(store, "m", files, trust=True)
    data = saved(store, "m")
    other = Store(tmp_path / "other")
    with pytest.raises(UnsupportedModel, match="code"):
        await load(other, data)
    assert (await load(other, data, LoadOptions(trust=True)))[0].id == model.id


async def test_several_models_in_one_archive(store: Store, tmp_path: Path) -> None:
    ids = [add_model(store, f"m{seed}", seed).id for seed in range(2)]
    first, second = (unpacked(saved(store, f"m{seed}")) for seed in range(2))
    manifests = [json.loads(files["index.json"])["manifests"][0] for files in (first, second)]
    both = packed(first | second | {"index.json": json.dumps({"manifests": manifests}).encode()})
    other = Store(tmp_path / "other")
    with pytest.raises(BadRequest, match="2 models"):
        await load(other, both, LoadOptions("name"))
    assert [model.id for model in await load(other, both)] == ids
    assert [model.tags for model in other.list()] == [["m0"], ["m1"]]


def test_a_file_that_goes_while_it_is_saved(store: Store) -> None:
    add_model(store, "m")
    archive = archive_of(store, "m")
    os.truncate(next(path for path in archive.members[-1:][0][1:] if isinstance(path, Path)), 10)
    with pytest.raises(StorageFailed, match="became shorter"):
        list(archive.pieces())
    with pytest.raises(InvalidModel, match="missing or damaged"):
        archive_of(store, "m")


async def test_a_large_model_is_never_in_memory(store: Store) -> None:
    """A gigabyte's header takes one block, and its pieces are small."""
    (store.partial / "x.gguf").write_bytes(gguf(8 << 20))
    store.create({"x.gguf": store.ingest(store.partial / "x.gguf")}, "m")
    assert max(map(len, archive_of(store, "m").pieces())) <= 1 << 20
