"""Models that are pushed to a real registry, and taken from there by us and by others."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from modelrunner.errors import BadRequest, ModelNotFound, SourceFailed
from modelrunner.oci.credentials import Credential
from modelrunner.oci.push import Pusher
from modelrunner.oci.repository import Manner
from modelrunner.progress import WorkProgress
from modelrunner.pull import Puller
from modelrunner.pull.file import LocalFiles
from tests.oci.artifacts import published
from tests.oci.conftest import MANNER, Machine
from tests.oci.fake import FakeRegistry
from tests.oci.registry import Registry, digest, publish
from tests.pull.models import gguf, shards
from tests.pull.test_hostile import at_once
from tests.pull.test_puller import ignore
from tests.store.folders import model_files

IN_CHUNKS = Manner(pause=at_once, look_up_limit=20.0, patience=20.0, chunk=1 << 20)


def pusher(machine: Machine, manner: Manner = MANNER) -> Pusher:
    return Pusher(machine.store, machine.registries, machine.credentials, manner)


async def package(machine: Machine, name: str, files: dict[str, bytes]) -> str:
    """Makes a model of a folder or a GGUF file, as `modelrunner package` does. Returns its ID."""
    folder = machine.folder / "files" / name
    folder.mkdir(parents=True)
    for file, data in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(data)
    source = folder if "config.json" in files else folder / next(iter(files))
    return (await Puller(machine.store, []).pull(LocalFiles(source), ignore, name=name)).id


FORMS = {
    "one": {"x.gguf": gguf(3 << 20)},
    "shards": {f"x-{n:05}-of-00003.gguf": data for n, data in enumerate(shards(3), 1)},
    "folder": model_files(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("manner", [MANNER, IN_CHUNKS], ids=["whole", "chunks"])
async def test_packaged_pushed_and_pulled_elsewhere(
    registry: Registry, tmp_path: Path, form: str, manner: Manner
) -> None:
    here, there, third = (Machine(tmp_path / name) for name in ("here", "there", "third"))
    id = await package(here, form, FORMS[form])
    assert await package(third, form, FORMS[form]) == id  # the same files make the same model anywhere
    name = f"{registry.host}/team/{form}-{manner.chunk}:v1"
    assert await pusher(here, manner).push(form, name, ignore) == f"{name}@{id}"
    assert (await there.puller.pull(name, ignore)).id == id
    assert there.store.manifest(name) == here.store.manifest(form)
    assert {n: p.read_bytes() for n, p in there.store.bundle(name).files.items()} == {
        n: p.read_bytes() for n, p in here.store.bundle(form).files.items()
    }


async def test_what_the_registry_has_is_not_sent_again(registry: Registry, machine: Machine) -> None:
    id = await package(machine, "again", {"x.gguf": gguf(2 << 20, seed=11)})
    name = f"{registry.host}/team/again"
    await pusher(machine).push("again", name, ignore)
    before = registry.log.read_text().count("PUT /v2/team/again/blobs")
    await pusher(machine).push("again", f"{name}:second", ignore)
    assert registry.log.read_text().count("PUT /v2/team/again/blobs") == before
    machine.store.tag(id, name)
    seen: list[WorkProgress] = []
    await pusher(machine).push(id, f"{registry.host}/other/place", seen.append)  # mounted from team/again
    assert "PUT /v2/other/place/blobs" not in registry.log.read_text()
    assert seen[-1].current == seen[-1].total > 2 << 20


@pytest.mark.parametrize("kind", ["docker v0.1, safetensors with an archive", "ModelPack, archives"])
async def test_a_pulled_model_is_pushed_as_it_was_published(registry: Registry, machine: Machine, kind: str) -> None:
    model = published()[kind][0]
    name = publish(registry, "ai/as-published", "v1", model)
    await machine.puller.pull(name, ignore)
    assert (
        await pusher(machine).push(name, f"{registry.host}/copy/of:it", ignore)
        == f"{registry.host}/copy/of:it@{model.id}"
    )


async def test_a_name_to_push_to(registry: Registry, locked: Registry, machine: Machine) -> None:
    await package(machine, "hf.co/a/b", {"x.gguf": gguf()})
    with pytest.raises(BadRequest, match="no registry in its name"):
        await pusher(machine).push("hf.co/a/b", None, ignore)
    with pytest.raises(BadRequest, match="leave the digest out"):
        await pusher(machine).push("hf.co/a/b", f"x/y@sha256:{'0' * 64}", ignore)
    with pytest.raises(ModelNotFound):
        await pusher(machine).push("nothing-of-the-kind", f"{registry.host}/a/b", ignore)
    with pytest.raises(ModelNotFound, match="modelrunner login"):
        await pusher(machine).push("hf.co/a/b", f"{locked.host}/a/b", ignore)
    machine.credentials.store(locked.host, Credential("ada", "secret"))
    await pusher(machine, IN_CHUNKS).push("hf.co/a/b", f"{locked.host}/a/b", ignore)
    assert (await machine.puller.pull(f"{locked.host}/a/b", ignore)).id == machine.store.get("hf.co/a/b").id


def skopeo(*arguments: str) -> str:
    result = subprocess.run(["skopeo", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


async def test_skopeo_takes_ours_and_we_take_what_it_copies(
    registry: Registry, machine: Machine, tmp_path: Path
) -> None:
    id = await package(machine, "skopeo", model_files())
    name = f"{registry.host}/team/skopeo:v1"
    await pusher(machine).push("skopeo", name, ignore)
    insecure = ("--insecure-policy",)
    layout = tmp_path / "layout"
    await asyncio.to_thread(skopeo, *insecure, "copy", "--src-tls-verify=false", f"docker://{name}", f"dir:{layout}")
    assert digest((layout / "manifest.json").read_bytes()) == id
    copy = f"{registry.host}/copied/skopeo:v2"
    await asyncio.to_thread(skopeo, *insecure, "copy", "--dest-tls-verify=false", f"dir:{layout}", f"docker://{copy}")
    assert (await Machine(tmp_path / "there").puller.pull(copy, ignore)).id == id


async def test_oras_takes_ours_and_we_take_what_it_pushes(registry: Registry, machine: Machine, tmp_path: Path) -> None:
    import oras.client

    await package(machine, "oras", {"x.gguf": gguf(1 << 20, seed=4)})
    name = f"{registry.host}/team/oras:v1"
    await pusher(machine).push("oras", name, ignore)
    client = oras.client.OrasClient(insecure=True)
    taken = await asyncio.to_thread(client.pull, name, outdir=str(tmp_path / "taken"))
    assert [Path(file).read_bytes() for file in taken] == [gguf(1 << 20, seed=4)]

    (tmp_path / "x.gguf").write_bytes(gguf(5000, seed=5))
    (tmp_path / "config.json").write_text(json.dumps({"config": {"format": "gguf"}, "descriptor": {}}))
    theirs = f"{registry.host}/theirs/oras:v1"
    await asyncio.to_thread(
        client.push,
        target=theirs,
        files=[f"{tmp_path}/x.gguf:application/vnd.docker.ai.gguf.v3"],
        manifest_config=f"{tmp_path}/config.json:application/vnd.docker.ai.model.config.v0.1+json",
        disable_path_validation=True,
    )
    pulled = await machine.puller.pull(theirs, ignore)
    assert machine.store.bundle(pulled.id).model_file.read_bytes() == gguf(5000, seed=5)


class Uploads:
    """A registry's side of one chunked upload, which keeps what came of a chunk that was cut."""

    def __init__(self, fake: FakeRegistry, *, cuts: int, keeps: bool) -> None:
        self.data, self.received, self._cuts, self._keeps = bytearray(), 0, cuts, keeps
        self.manifests: list[bytes] = []
        fake.on("HEAD", self._missing)
        fake.on("POST .*/uploads/", self._begin)
        fake.on("(PATCH|PUT) .*/uploads/", self._take)
        fake.on("GET .*/uploads/", self._tell)
        fake.on("PUT .*/manifests/", self._manifest)

    async def _missing(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    async def _begin(self, request: web.Request) -> web.StreamResponse:
        self.data.clear()
        return web.Response(status=202, headers={"Location": "/v2/ai/tiny/blobs/uploads/1?state=0"})

    async def _take(self, request: web.Request) -> web.StreamResponse:
        if request.method == "PATCH":
            assert request.headers["Content-Range"].startswith(f"{len(self.data)}-")
        cut = request.method == "PATCH" and len(self.data) > 1 << 20 and self._cuts > 0
        async for piece in request.content.iter_any():
            self.received += len(piece)
            self.data += piece
            if cut and len(self.data) > 3 << 19:
                self._cuts -= 1
                if not self._keeps:
                    self.data.clear()
                assert request.transport is not None
                request.transport.close()
                break
        if request.method == "PUT":
            good = digest(bytes(self.data)) == request.query["digest"]
            return web.Response(status=201 if good else 400)
        return web.Response(status=202, headers={"Location": f"/v2/ai/tiny/blobs/uploads/1?state={len(self.data)}"})

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        if not self._keeps:
            return web.Response(status=404)
        return web.Response(status=204, headers={"Range": f"0-{len(self.data) - 1}"})

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        self.manifests.append(await request.read())
        return web.Response(status=201)


@pytest.fixture
async def fake() -> AsyncIterator[FakeRegistry]:
    async with FakeRegistry().running() as running:
        yield running


@pytest.mark.parametrize(("keeps", "most"), [(True, 1.1), (False, 2.2)])
async def test_a_push_that_is_cut_goes_on(fake: FakeRegistry, machine: Machine, keeps: bool, most: float) -> None:
    size = 8 << 20
    await package(machine, "cut", {"x.gguf": gguf(size)})
    uploads = Uploads(fake, cuts=1, keeps=keeps)
    await pusher(machine, IN_CHUNKS).push("cut", f"{fake.host}/ai/tiny", ignore)
    assert uploads.manifests == [machine.store.manifest("cut")]
    assert size < uploads.received < most * size


async def test_a_push_that_fails_leaves_no_manifest(fake: FakeRegistry, machine: Machine) -> None:
    await package(machine, "fails", {"x.gguf": gguf(8 << 20)})
    uploads = Uploads(fake, cuts=99, keeps=False)
    with pytest.raises(SourceFailed, match="could not be sent"):
        await pusher(machine, IN_CHUNKS).push("fails", f"{fake.host}/ai/tiny", ignore)
    assert uploads.manifests == []


@pytest.mark.parametrize(
    "location", ["http://169.254.169.254/up", "https://10.0.0.1/up", "file:///tmp/up", "http://[::"]
)
async def test_an_upload_is_sent_nowhere_else(fake: FakeRegistry, machine: Machine, location: str) -> None:
    await package(machine, "away", {"x.gguf": gguf()})

    async def begin(request: web.Request) -> web.StreamResponse:
        return web.Response(status=202, headers={"Location": location})

    fake.on("POST", begin)
    with pytest.raises(SourceFailed):
        await pusher(machine).push("away", f"{fake.host}/ai/tiny", ignore)
