"""Ollama's own client against the daemon: nothing but its base URL is changed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.oci.registry import serving
from tests.pull.hub import Hub, Repository
from tests.pull.models import gguf
from tests.waiting import HUNG

HELLO: Any = [{"role": "user", "content": "hello"}]
NAME = "hf.co/Org/Tiny-GGUF"
Made = tuple[Daemon, ollama.AsyncClient]


@pytest.fixture
async def client(start_daemon: StartDaemon) -> AsyncIterator[Made]:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    async with ollama.AsyncClient(f"http://127.0.0.1:{daemon.port}") as made:
        yield daemon, made


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    async with Hub().running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": gguf(3 << 20)})
        yield hub


async def test_chats_and_generations(client: Made) -> None:
    _, made = client
    answer = await made.chat("smol", HELLO, options={"num_predict": 3})
    assert (answer.message.content, answer.done_reason, answer.eval_count) == ("w0 w1 w2 ", "stop", 3)
    assert answer.total_duration >= answer.load_duration > 0  # type: ignore[operator]
    words = [part.message.content async for part in await made.chat("smol", HELLO, stream=True)]
    assert words == [f"w{number} " for number in range(8)] + [""]
    assert (await made.generate("smol", "hello", options={"num_predict": 1})).response == "w0 "
    assert "".join([part.response or "" async for part in await made.generate("smol", "x", stream=True)]).endswith(
        "w7 "
    )


async def test_embeddings(client: Made) -> None:
    _, made = client
    assert (await made.embed("smol", ["a", "bcd"])).embeddings == [[1.0, 0.5, -0.5], [3.0, 0.5, -0.5]]
    assert list((await made.embeddings("smol", "a")).embedding) == [1.0, 0.5, -0.5]


async def test_the_models_that_are_here(client: Made) -> None:
    daemon, made = client
    listed = (await made.list()).models
    assert [model.model for model in listed] == ["smol:latest", "other:latest"]
    assert listed[0].details is not None
    assert (listed[0].details.format, listed[0].details.family) == ("gguf", "llama")
    assert listed[0].size
    shown = await made.show("smol")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.capabilities == ["completion"]
    assert (await made.copy("smol", "team/mine")).status == "success"
    assert (await made.create("again", from_="smol")).status == "success"
    assert {model.model for model in (await made.list()).models} == {
        f"{name}:latest" for name in ("smol", "team/mine", "again", "other")
    }
    assert (await made.create("kind", from_="smol", system="be kind", parameters={"top_k": 3})).status == "success"
    assert "PARAMETER top_k 3\n" in str((await made.show("kind")).modelfile)
    await made.delete("kind")
    assert (await made.delete("team/mine")).status == "success"
    await made.delete("other")
    assert {model.model for model in (await made.list()).models} == {"smol:latest", "again:latest"}
    async with daemon.tcp.get("/api/version") as answer:
        assert set(await answer.json()) == {"version"}
    async with daemon.tcp.head("/") as answer:
        assert answer.status == 200


async def test_what_runs_and_its_end(client: Made) -> None:
    _, made = client
    assert (await made.ps()).models == []
    assert (await made.generate("smol", keep_alive=-1)).done_reason == "load"
    [running] = (await made.ps()).models
    assert running.model == "smol:latest"
    assert running.size
    assert running.expires_at is not None
    assert running.expires_at.year > 2100
    assert running.context_length
    await made.chat("smol", HELLO, keep_alive="1h")
    [running] = (await made.ps()).models
    assert running.expires_at is not None
    assert running.expires_at.year < 2100
    assert (await made.generate("smol", keep_alive=0)).done_reason == "unload"
    assert (await made.ps()).models == []


async def test_no_keep_alive_unloads_after_the_answer(client: Made) -> None:
    _, made = client
    await made.chat("smol", HELLO, keep_alive=0)
    async with asyncio.timeout(HUNG):
        while (await made.ps()).models:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_pull(client: Made, hub: Hub, stream: bool) -> None:
    _, made = client
    if stream:
        parts = [part async for part in await made.pull(NAME, stream=True)]
        assert parts[-1].status == "success"
        assert any(part.total == part.completed and part.digest for part in parts if part.total)
    else:
        assert (await made.pull(NAME)).status == "success"
    listed = f"{NAME.lower()}:latest"  # as Ollama names it
    assert listed in {model.model for model in (await made.list()).models}
    assert (await made.show(listed)).details
    with pytest.raises(ollama.ResponseError) as missing:
        await made.pull("hf.co/Org/Nothing")
    assert missing.value.status_code == 404


async def test_errors_are_typed(client: Made, tmp_path: Path) -> None:
    daemon, made = client
    unknown_models: list[Any] = [made.chat("nope", HELLO), made.embed("nope", "x"), made.copy("nope", "x")]
    for asked in (*unknown_models, made.show("nope"), made.delete("nope")):
        with pytest.raises(ollama.ResponseError, match="nope") as unknown:
            await asked
        assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="not here"):
        [part async for part in await made.chat("nope", HELLO, stream=True)]
    with pytest.raises(ollama.ResponseError) as impossible:
        await made.create("x", files={"x.gguf": f"sha256:{'0' * 64}"}, quantize="q4_0")
    assert impossible.value.status_code == 501
    with pytest.raises(ollama.ResponseError) as forbidden:
        await made.pull(f"file://{tmp_path}/x.gguf")
    assert forbidden.value.status_code == 403
    assert daemon.backend.runs == 0


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({}, 400, "from names no model"),
        ({"from": "smol", "files": {"x.gguf": "sha256:0"}}, 400, "leave `from` or `files` out"),
        ({"from": "smol", "adapters": {"x.gguf": "sha256:0"}, "quantize": "q4_0"}, 501, "adapters cannot be"),
        ({"files": {"x.gguf": "sha256:0"}, "adapters": {"y.gguf": "sha256:0"}}, 501, "adapters cannot be"),
        ({"modelfile": "FROM smol\nADAPTER ./x.gguf"}, 501, "name it in `adapters`"),
        ({"from": "file:///x.gguf"}, 403, "`modelrunner package`"),
        ({"modelfile": "FROM file:///x.gguf"}, 403, "`modelrunner package`"),
    ],
)
async def test_what_no_model_is_made_of(client: Made, asked: dict[str, Any], status: int, said: str) -> None:
    daemon, _ = client
    for sent in (daemon.tcp, daemon.unix):
        async with sent.post("/api/create", json={"model": "made", **asked}) as answer:
            assert (answer.status, said in await answer.text()) == (status, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_is_pushed_to_the_registry_of_its_name(
    start_daemon: StartDaemon, tmp_path: Path, stream: bool
) -> None:
    with ExitStack() as running:
        registry = running.enter_context(serving(tmp_path / "registry"))
        daemon = await start_daemon(models={"smol": 0}, registries={registry.host: {}})
        async with ollama.AsyncClient(f"http://127.0.0.1:{daemon.port}") as made:
            name = f"{registry.host}/team/smol"
            await made.copy("smol", name)
            if stream:
                statuses = [part.status async for part in await made.push(name, stream=True)]
                assert any((status or "").startswith("pushing ") for status in statuses)
                assert statuses[-1] == "success"
            else:
                assert (await made.push(name)).status == "success"
            await made.delete(name)
            assert (await made.pull(name)).status == "success"
            running.close()
            with pytest.raises(ollama.ResponseError, match="plain_http"):
                await made.push(name, insecure=True)
            with pytest.raises(ollama.ResponseError, match="refuses the connection"):
                await made.push(name)


async def test_a_stored_file_is_known_by_its_digest(client: Made) -> None:
    daemon, _ = client
    file = next((daemon.settings.data_dir / "blobs" / "sha256").rglob("*"))
    digest = next(path.name for path in file.parent.rglob("*") if path.is_file())
    for name, status in ((digest, 200), ("0" * 64, 404), ("x", 400)):
        async with daemon.tcp.head(f"/api/blobs/sha256:{name}") as answer:
            assert answer.status == status


async def test_an_engine_that_dies_in_a_stream(client: Made) -> None:
    daemon, made = client
    daemon.backend.knobs = ("--die", "1")
    with pytest.raises(ollama.ResponseError, match="the fake engine threw up"):
        [part async for part in await made.chat("smol", HELLO, stream=True)]


async def test_a_stream_that_is_left_ends_its_request(client: Made) -> None:
    daemon, made = client
    daemon.backend.knobs = ("--tokens", "100000", "--rate", "100")
    stream = await made.chat("smol", HELLO, stream=True)
    await anext(aiter(stream))
    await stream.aclose()  # type: ignore[attr-defined]
    in_use = True
    async with asyncio.timeout(HUNG):
        while in_use:
            async with daemon.tcp.get("/engines/ps") as answer:
                [runner] = await answer.json()
                in_use = runner["in_use"]
