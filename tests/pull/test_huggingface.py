"""Pulls from a hub, through the public Puller into a real store."""

import asyncio
import logging
import os
import sys
from pathlib import Path
from unittest.mock import ANY

import httpx
import pytest

from modelrunner.errors import InsufficientDisk, InvalidReference, ModelNotFound, SourceFailed, UnsupportedModel
from modelrunner.progress import FileProgress, WorkProgress
from modelrunner.pull import Puller, PullResult
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.store import Store, foreignformats
from modelrunner.web.download import Downloader
from modelrunner.web.partial import RemoteFile
from modelrunner.web.session import new_client
from modelrunner_whisper.model import FORMAT
from tests.pull.hub import Fault, Hub, Repository, sha256
from tests.pull.models import gguf, shards
from tests.store.folders import model_files, sharded
from tests.waiting import HUNG
from tests.whisper import files as whisper

SIZE = 2 << 20
MODEL = gguf(SIZE)
NAME = "hf.co/Org/Tiny-GGUF"


class Client:
    """Everything that one daemon's worth of pulling needs; `again()` is the next daemon on the same data."""

    def __init__(self, store: Store, hub: Hub) -> None:
        self.store, self.hub = store, hub
        self.pauses: list[float] = []
        self.lines: list[WorkProgress] = []
        hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": MODEL, "README.md": b"# Tiny"})
        self.repository = hub.repositories["Org/Tiny-GGUF"]
        self.again()

    def again(self) -> None:
        self.puller = Puller(self.store, [HuggingFaceSource(self.hub.endpoint, pause=self._pause)])

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def pull(self, text: str = NAME, token: str | None = None) -> PullResult:
        return await self.puller.pull(text, self.lines.append, token=token)

    def content(self, model: PullResult) -> bytes:
        return self.store.bundle(model.id).model_file.read_bytes()

    @property
    def partial(self) -> list[Path]:
        found = self.store.partial.rglob("*")
        return [path for path in found if (path.is_file() or path.is_symlink())]


@pytest.fixture
def client(store: Store, hub: Hub) -> Client:
    return Client(store, hub)


async def test_the_default_quantization_arrives_whole(client: Client) -> None:
    client.repository.files["tiny-Q8_0.gguf"] = gguf(SIZE, seed=8)
    model = await client.pull()
    assert client.content(model) == MODEL
    assert model.name == "hf.co/org/tiny-gguf"
    assert client.hub.sent == len(MODEL)
    assert client.partial == []


async def test_progress_counts_up_to_the_total(client: Client) -> None:
    await client.pull()
    lines = [line for line in client.lines if line.phase == "downloading"]
    assert [line.current for line in lines] == sorted(line.current for line in lines)
    assert (lines[-1].current, lines[-1].total) == (len(MODEL), len(MODEL))
    assert lines[-1].file == FileProgress(f"sha256:{sha256(MODEL)}", len(MODEL), len(MODEL), ANY)
    assert lines[-1].rate > 0


async def test_a_named_quantization_in_any_case(client: Client) -> None:
    client.repository.files["tiny-Q8_0.gguf"] = other = gguf(4096, seed=8)
    assert client.content(await client.pull(f"{NAME}:q8_0")) == other


async def test_an_unknown_quantization_lists_what_there_is(client: Client) -> None:
    client.repository.files["tiny-Q8_0.gguf"] = gguf(4096, seed=8)
    with pytest.raises(ModelNotFound, match="no quantization Q2_K; it has Q4_K_M, Q8_0"):
        await client.pull(f"{NAME}:Q2_K")


async def test_shards_and_projector_come_together(client: Client) -> None:
    parts = shards(3)
    client.repository.files = {f"big-Q4_K_M-{n:05}-of-00003.gguf": part for n, part in enumerate(parts, 1)}
    client.repository.files["mmproj-F16.gguf"] = gguf(kind="mmproj", architecture="clip")
    bundle = client.store.bundle((await client.pull()).id)
    names = ["model-00001-of-00003.gguf", "model-00002-of-00003.gguf", "model-00003-of-00003.gguf", "mmproj.gguf"]
    assert list(bundle.files) == names
    assert [bundle.files[name].read_bytes() for name in names[:3]] == parts


async def test_a_repository_without_a_model(client: Client) -> None:
    client.repository.files = {"pytorch_model.bin": b"x", "config.json": b"{}"}
    with pytest.raises(UnsupportedModel, match="no complete model in GGUF, safetensors or"):
        await client.pull()


CLUTTER = {"README.md": b"#", "pytorch_model.bin": b"x", "onnx/model.onnx": b"x", "train.py": b"x", "tf_model.h5": b"x"}


async def test_safetensors_where_there_is_no_gguf(client: Client) -> None:
    files = sharded() | {"1_Pooling/config.json": b"{}"}
    client.repository.files = files | CLUTTER | {"consolidated.safetensors": b"the same again"}
    bundle = client.store.bundle((await client.pull()).id)
    assert {name: path.read_bytes() for name, path in bundle.files.items()} == files
    sent = client.hub.sent
    await client.pull()
    assert client.hub.sent == sent


async def test_a_format_of_a_backend(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are no code, whatever their name is."""
    monkeypatch.setitem(foreignformats._formats, FORMAT.format, FORMAT)
    client.repository.files = whisper.model() | CLUTTER
    bundle = client.store.bundle((await client.pull()).id)
    assert {name: path.read_bytes() for name, path in bundle.files.items()} == whisper.model()
    assert bundle.format is FORMAT.format
    assert bundle.capabilities == frozenset({"transcription"})
    assert not bundle.brings_code


async def test_a_damaged_small_file_is_noticed(client: Client) -> None:
    client.repository.files = model_files()
    client.hub.faults += [Fault(flip=0)] * 20
    with pytest.raises(SourceFailed, match=r"\.json arrived damaged"):
        await client.pull()


async def test_gguf_comes_before_safetensors(client: Client) -> None:
    client.repository.files |= model_files()
    assert client.content(await client.pull()) == MODEL


async def test_a_quantization_is_not_looked_for_in_safetensors(client: Client) -> None:
    client.repository.files = model_files()
    with pytest.raises(UnsupportedModel, match="no complete model"):
        await client.pull(f"{NAME}:Q4_K_M")


async def test_a_model_with_code_is_refused_before_its_weights_come(client: Client) -> None:
    client.repository.files = files = model_files(auto_map={"AutoModel": "modeling.X"}) | {"modeling.py": b"code"}
    with pytest.raises(UnsupportedModel, match="auto_map"):
        await client.pull()
    assert client.hub.sent < len(files["config.json"]) + len(files["model.safetensors"])
    assert client.store.list() == []
    model = await client.puller.pull(NAME, client.lines.append, trust=True)
    assert set(client.store.bundle(model.id).files) == set(files)


async def test_an_unknown_repository(client: Client) -> None:
    with pytest.raises(ModelNotFound, match=r"hf\.co/Org/Absent is not on the hub, or it is private"):
        await client.pull("hf.co/Org/Absent")


@pytest.mark.parametrize(
    "text", ["hf.co/Org", "hf.co/Org/../x", "hf.co/a/b/c", "hf.co/a/b:", "hf.co/a/b@sha256:" + "0" * 64]
)
async def test_texts_that_are_no_repository(client: Client, text: str) -> None:
    with pytest.raises(InvalidReference):
        await client.pull(text)
    assert client.hub.lookups == []


async def test_the_token_goes_to_the_hub_alone(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client.repository.token = "hf_verysecret"
    await client.pull(token="hf_verysecret")
    assert {headers.get("Authorization") for headers in client.hub.lookups} == {"Bearer hf_verysecret"}
    assert all("Authorization" not in content.headers for content in client.hub.contents)
    assert "verysecret" not in caplog.text + repr(client.lines)


@pytest.mark.parametrize(("gated", "expected"), [(True, "is gated"), (False, "private")])
async def test_a_wrong_token(client: Client, gated: bool, expected: str) -> None:
    client.repository.token, client.repository.gated = "right", gated
    with pytest.raises((ModelNotFound, SourceFailed), match=expected) as failed:
        await client.pull(token="hf_wrong")
    assert "hf_wrong" not in str(failed.value)


async def test_a_cut_is_mended_within_the_pull(client: Client) -> None:
    client.hub.faults.append(Fault(cut=len(MODEL) // 2))
    assert client.content(await client.pull()) == MODEL
    assert client.hub.sent <= len(MODEL) * 1.05
    assert client.pauses == [1.0]


async def test_the_next_pull_goes_on_where_one_failed(client: Client) -> None:
    client.hub.faults.extend([Fault(cut=len(MODEL) // 2), *[Fault(status=503)] * 5])
    with pytest.raises(SourceFailed, match="the source answered 503; the received bytes are kept"):
        await client.pull()
    assert client.store.list() == []
    client.again()
    assert client.content(await client.pull()) == MODEL
    assert client.hub.sent <= len(MODEL) * 1.05


@pytest.mark.parametrize(
    "fault",
    [Fault(shift=7), Fault(shift=-7), Fault(status=416), Fault(whole=True), Fault(status=503), Fault(flip=SIZE - 1)],
)
async def test_a_resume_that_goes_wrong_ends_right(client: Client, fault: Fault) -> None:
    client.hub.faults.extend([Fault(cut=len(MODEL) // 2), fault])
    assert client.content(await client.pull()) == MODEL
    assert client.partial == []


async def test_a_file_that_is_damaged_each_time_never_arrives(client: Client) -> None:
    client.hub.faults.extend([Fault(flip=100), Fault(flip=200)])
    with pytest.raises(SourceFailed, match="damaged twice"):
        await client.pull()
    assert client.store.list() == []
    assert client.partial == []


async def test_the_hub_may_ask_for_patience(client: Client) -> None:
    client.hub.faults.append(Fault(status=429, retry_after="7"))
    await client.pull()
    assert client.pauses == [7.0]


async def test_too_much_patience_is_handed_to_the_caller(client: Client) -> None:
    client.hub.faults.append(Fault(status=429, retry_after="3600"))
    with pytest.raises(SourceFailed, match="429") as failed:
        await client.pull()
    assert failed.value.retry_after == 3600
    assert client.pauses == []


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_file_that_is_refused_is_not_asked_for_again(client: Client, status: int) -> None:
    client.hub.faults.append(Fault(status=status))
    with pytest.raises((SourceFailed, ModelNotFound)):
        await client.pull()
    assert len(client.hub.contents) == 1


@pytest.mark.parametrize("status", [401, 403])
async def test_an_address_that_expires_in_the_middle_is_asked_for_again(client: Client, status: int) -> None:
    """The storage behind the hub signs its addresses for a time."""
    client.hub.faults.extend([Fault(cut=1000), Fault(status=status)])
    assert client.content(await client.pull()) == MODEL
    assert len(client.hub.contents) == 3


@pytest.mark.parametrize("status", [401, 429, 500])
async def test_a_hub_that_answers_with_an_error(client: Client, status: int) -> None:
    client.hub.status = status
    with pytest.raises((SourceFailed, ModelNotFound)):
        await client.pull()


async def test_a_file_that_changed_since_the_cut_starts_anew(client: Client) -> None:
    client.hub.faults.extend([Fault(cut=len(MODEL) // 2), *[Fault(status=503)] * 5])
    with pytest.raises(SourceFailed):
        await client.pull()
    client.repository.files["tiny-Q4_K_M.gguf"] = changed = gguf(SIZE, seed=99)
    assert client.content(await client.pull()) == changed


async def _leave(client: Client, change: str) -> None:
    """Has an interrupted pull behind it, and then somebody meddles with what it left."""
    client.hub.faults.extend([Fault(cut=len(MODEL) // 2), *[Fault(status=503)] * 5])
    with pytest.raises(SourceFailed):
        await client.pull()
    (path,) = client.partial
    match change:
        case "too long":
            path.write_bytes(MODEL + b"more")
        case "wrong bytes":
            path.write_bytes(bytes(len(MODEL)))
        case "wrong beginning":
            path.write_bytes(bytes(1000))
        case "complete":
            path.write_bytes(MODEL)
        case "link":
            target = client.store.data / "elsewhere"
            target.write_bytes(b"mine")
            path.unlink()
            path.symlink_to(target)
        case "folder instead":
            path.unlink()
            (path / "deep").mkdir(parents=True)
        case "folder is a link":
            folder = path.parent.rename(client.store.data / "elsewhere")
            path.parent.symlink_to(folder)
        case "folder is a file":
            path.parent.rename(client.store.data / "elsewhere")
            path.parent.write_bytes(b"garbage")


@pytest.mark.parametrize(
    "change",
    [
        "too long",
        "wrong bytes",
        "wrong beginning",
        "complete",
        "link",
        "folder instead",
        "folder is a link",
        "folder is a file",
    ],
)
async def test_partial_files_are_healed_and_never_trusted(client: Client, change: str) -> None:
    await _leave(client, change)
    client.again()
    assert client.content(await client.pull()) == MODEL
    elsewhere = client.store.data / "elsewhere"
    if change == "link":
        assert elsewhere.read_bytes() == b"mine"
    if change == "complete":
        assert client.hub.sent == len(MODEL) // 2


async def test_a_model_that_cannot_fit_is_refused_before_a_byte(client: Client) -> None:
    client.repository.declared["tiny-Q4_K_M.gguf"] = 1 << 60
    with pytest.raises(InsufficientDisk, match=r"needed \d+ bytes .* free \d+ bytes"):
        await client.pull()
    assert client.hub.contents == []


async def test_twenty_pulls_are_one_download(client: Client) -> None:
    release = asyncio.Event()
    client.hub.faults.append(Fault(hold=release))
    pulls = [asyncio.create_task(client.pull()) for _ in range(20)]
    await asyncio.wait_for(client.hub.held.wait(), HUNG)
    for leaving in pulls[::2]:
        leaving.cancel()
    release.set()
    models = await asyncio.gather(*pulls[1::2])
    assert {model.id for model in models} == {client.store.list()[0].id}
    assert client.hub.sent == len(MODEL)
    assert len(client.hub.contents) == 1


async def test_the_download_stops_with_the_last_who_wanted_it(client: Client) -> None:
    arrived = asyncio.Event()

    def watch(line: WorkProgress) -> None:
        if line.current >= 1 << 20:
            arrived.set()

    client.hub.faults.append(Fault(hold=asyncio.Event()))
    pulls = [asyncio.create_task(client.puller.pull(NAME, watch)) for _ in range(2)]
    await asyncio.wait_for(arrived.wait(), HUNG)
    for leaving in pulls:
        leaving.cancel()
    await asyncio.wait(pulls)
    assert all(pull.cancelled() for pull in pulls)
    assert client.store.list() == []
    assert client.content(await client.pull()) == MODEL
    _, resumed = client.hub.contents
    assert int(resumed.headers["Range"].removeprefix("bytes=").removesuffix("-")) >= 1 << 20


@pytest.mark.parametrize("login", [False, True])
async def test_the_environment_is_the_hubs_own(client: Client, tmp_path: Path, login: bool) -> None:
    """Its token is a variable, or lies where a login with the hub's client leaves it."""
    client.repository.token = "hf_fromtheenvironment"
    script = (
        "import asyncio, pathlib, sys\n"
        "from modelrunner.pull import Context, PullSpec\n"
        "from modelrunner.pull.huggingface import HuggingFaceSource\n"
        "async def stored(sha256): return False\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "asyncio.run(HuggingFaceSource().fetch(PullSpec(sys.argv[2], '', None), Context(folder, print, stored)))"
    )
    settings = {"HF_ENDPOINT": client.hub.endpoint, "HF_HOME": str(tmp_path)}
    if login:
        (tmp_path / "token").write_text("hf_fromtheenvironment\n")
    else:
        settings["HF_TOKEN"] = "hf_fromtheenvironment"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(tmp_path), NAME), env={**os.environ, **settings}
    )
    assert await process.wait() == 0
    assert (tmp_path / sha256(MODEL)).read_bytes() == MODEL


async def test_an_unchanged_model_is_not_fetched_again(client: Client) -> None:
    first = await client.pull()
    client.again()
    assert (await client.pull()).id == first.id
    assert client.lines[-1].message == "Using cached model"
    assert len(client.hub.contents) == 1


async def test_a_changed_model_is_fetched(client: Client) -> None:
    await client.pull()
    client.repository.files["tiny-Q4_K_M.gguf"] = changed = gguf(4096, seed=5)
    assert client.content(await client.pull()) == changed


async def test_without_the_hub_the_local_model_stays_usable(client: Client) -> None:
    first = await client.pull()
    client.hub.status = 503
    assert (await client.pull()).id == first.id
    assert [line.warning for line in client.lines[-2:]] == [True, False]


PUBLIC, PRIVATE = "https://93.184.216.34", "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("origin", "target"),
    [
        (PUBLIC, "http://169.254.169.254/latest"),
        (PUBLIC, "https://169.254.169.254/latest"),
        (PUBLIC, "https://127.0.0.1/x"),
        (PUBLIC, "https://[::1]/x"),
        (PUBLIC, "https://10.1.2.3/x"),
        (PUBLIC, "http://93.184.216.35/x"),
        (PRIVATE, "http://169.254.169.254/latest"),
    ],
)
async def test_redirects_to_places_inside_are_not_followed(tmp_path: Path, origin: str, target: str) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(302, headers={"Location": target})

    file = RemoteFile("x.gguf", f"{origin}/x.gguf", 4, sha256(b"GGUF"))
    async with new_client(origin, transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(SourceFailed, match="not followed"):
            await Downloader(client, {}).fetch(file, tmp_path / "x", lambda _: None)
    assert asked == [file.url]


async def test_redirects_in_a_circle_end(tmp_path: Path) -> None:
    async def no_pause(seconds: float) -> None:
        """Time is not what is tested."""

    circle = httpx.MockTransport(lambda request: httpx.Response(302, headers={"Location": str(request.url)}))
    file = RemoteFile("x.gguf", f"{PUBLIC}/x.gguf", 4, sha256(b"GGUF"))
    async with new_client(PUBLIC, transport=circle) as client:
        with pytest.raises(SourceFailed, match="could not be fetched"):
            await Downloader(client, {}, pause=no_pause).fetch(file, tmp_path / "x", lambda _: None)


async def test_a_file_that_is_here_is_not_fetched_again(client: Client) -> None:
    client.repository.files = parts = {
        f"big-Q4_K_M-{n:05}-of-00003.gguf": part for n, part in enumerate(shards(3, 50_000), 1)
    }
    first = await client.pull()
    changed = dict(zip(parts, shards(3, 50_000), strict=True))
    last = "big-Q4_K_M-00003-of-00003.gguf"
    changed[last] = changed[last][:-1] + b"\0"
    client.repository.files = changed
    sent = len(client.hub.contents)
    second = await client.pull()
    assert second.id != first.id
    assert [content.digest for content in client.hub.contents[sent:]] == [sha256(changed[last])]
    bundle = client.store.bundle(second.id)
    assert [path.read_bytes() for path in bundle.files.values()] == list(changed.values())


async def test_another_name_for_the_same_files_costs_no_download(client: Client) -> None:
    first = await client.pull()
    again = await client.puller.pull(NAME, client.lines.append, name="mine")
    assert (again.id, again.name) == (first.id, "mine")
    assert client.hub.sent == len(MODEL)


@pytest.mark.parametrize("damaged", [MODEL[: len(MODEL) // 2], MODEL[:-1] + bytes([MODEL[-1] ^ 1])])
async def test_a_damaged_file_of_another_model_is_fetched_again(client: Client, damaged: bytes) -> None:
    first = await client.pull()
    blob = client.store.data / "blobs" / "sha256" / sha256(MODEL)
    blob.chmod(0o600)
    blob.write_bytes(damaged)
    again = await client.puller.pull(NAME, client.lines.append, name="mine")
    assert (again.id, client.hub.sent) == (first.id, 2 * len(MODEL))
    assert client.content(again) == MODEL
    assert client.store.verify(first.id) == ()
