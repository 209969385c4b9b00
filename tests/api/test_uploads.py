"""Ollama's way to send files and to make a model of them, by its own client."""

import asyncio
import hashlib
import os
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.models import lora
from tests.store.folders import model_files, write
from tests.store.samples import write_gguf
from tests.store.test_adapters import peft
from tests.waiting import HUNG

LIMIT = 64 << 10


def client_of(daemon: Daemon) -> ollama.AsyncClient:
    return ollama.AsyncClient(f"http://127.0.0.1:{daemon.port}")


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def waiting(daemon: Daemon) -> list[Path]:
    return list((daemon.settings.data_dir / "partial").glob("*"))


async def test_a_model_is_made_of_a_file_that_was_sent(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon()
    file = write_gguf(tmp_path / "any name.gguf")
    async with client_of(daemon) as client:
        for name in ("one", "two"):  # the second time the file is here
            digest = await client.create_blob(file)
            made = await client.create(name, files={file.name: digest}, system="You are Mario.")
            assert made.status == "success"
        shown = await client.show("two")
        assert "You are Mario." in (shown.modelfile or "")
        assert [model.model for model in (await client.list()).models] == ["one:latest", "two:latest"]
    assert waiting(daemon) == []


async def test_the_files_of_a_folder_make_a_model(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon()
    folder = write(tmp_path / "folder", model_files())
    async with client_of(daemon) as client:
        files = {path.name: await client.create_blob(path) for path in folder.iterdir()}
        assert (await client.create("folder", files=files)).status == "success"
        details = (await client.show("folder")).details
    assert details is not None
    assert details.format == "safetensors"


async def test_adapters_that_were_sent_join_a_model(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon()
    width = 32
    base = write_gguf(tmp_path / "m.gguf", tensors={"blk.0.attn_q.weight": np.zeros((width, width), np.float32)})
    adapter = lora.write_gguf(tmp_path / "my style.gguf", width)
    other = write(tmp_path / "other", {"x.txt": b"{}"}) / "x.txt"
    async with client_of(daemon) as client:
        await client.create("base", files={base.name: await client.create_blob(base)}, system="You are Mario.")
        sent = await client.create_blob(adapter)
        assert (await client.create("styled", from_="base", adapters={adapter.name: sent})).status == "success"
        assert "You are Mario." in ((await client.show("styled")).modelfile or "")
        assert waiting(daemon) == []
        odd = await client.create_blob(other)
        for adapters, status, said in (
            ({"x.gguf": digest_of(b"1")}, 404, "send it first"),
            ({"x.txt": odd}, 400, "is not a LoRA adapter"),
            ({"x.gguf": await client.create_blob(base)}, 422, "not a LoRA adapter"),
        ):
            with pytest.raises(ollama.ResponseError, match=said) as refused:
                await client.create("x", from_="base", adapters=adapters)
            assert refused.value.status_code == status
    async with daemon.unix.get("/models/styled") as answer:
        assert [each["name"] for each in (await answer.json())["adapters"]] == ["my-style"]


async def test_the_files_of_a_peft_adapter_join_a_folder(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon()
    base, adapter = write(tmp_path / "folder", model_files()), peft(tmp_path / "style")
    async with client_of(daemon) as client:
        for name, folder in (("base", base), ("styled", adapter), ("again", adapter)):  # then its files are stored
            files = {path.name: await client.create_blob(path) for path in folder.iterdir()}
            given: Any = {"files": files} if name == "base" else {"from_": "base", "adapters": files}
            assert (await client.create(name, **given)).status == "success"
    async with daemon.unix.get("/models/styled") as answer:
        assert [each["name"] for each in (await answer.json())["adapters"]] == ["adapter"]
    assert waiting(daemon) == []


async def test_what_is_sent_must_have_its_digest(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    for digest in (digest_of(b"other"), "sha256:x"):
        async with daemon.tcp.post(f"/api/blobs/{digest}", data=b"content") as answer:
            assert answer.status == 400
    async with daemon.tcp.head(f"/api/blobs/{digest_of(b'other')}") as answer:
        assert answer.status == 404
    assert waiting(daemon) == []


async def test_a_file_is_known_once_it_was_sent(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    place = f"/api/blobs/{digest_of(b'content')}"
    for status in (201, 200):
        async with daemon.tcp.post(place, data=b"content") as answer:
            assert answer.status == status
        async with daemon.tcp.head(place) as answer:
            assert answer.status == 200


async def test_files_that_make_no_model_are_refused(start_daemon: StartDaemon) -> None:
    one, other = digest_of(b"1"), digest_of(b"2")
    async with client_of(await start_daemon()) as client:
        for files, base, status, said in (
            ({"a.gguf": one}, None, 404, "send it first"),
            ({"a.gguf": "../../etc/passwd"}, None, 400, "digest"),
            ({"a.gguf": one}, "smol", 400, "leave `from` or `files` out"),
            ({"config.json": one, "evil.py": other}, None, 422, "carry code"),
            ({"a.txt": one, "b.txt": other}, None, 422, "no complete model"),
        ):
            with pytest.raises(ollama.ResponseError, match=said) as refused:
                await client.create("x", from_=base, files=files)
            assert refused.value.status_code == status


async def test_the_quota_holds_for_what_is_sent(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models_quota=LIMIT)
    for number, (size, status) in enumerate(((LIMIT // 2, 201), (LIMIT // 2 - 1, 201), (LIMIT // 2, 507))):
        content = bytes([number]) * size
        async with daemon.tcp.post(f"/api/blobs/{digest_of(content)}", data=content) as answer:
            assert answer.status == status
    assert len(waiting(daemon)) == 2


class Slow:
    """A body of which a half has come, until `go_on` is set; then the other one."""

    def __init__(self, content: bytes) -> None:
        self.content, self.half_sent, self.go_on = content, asyncio.Event(), asyncio.Event()

    async def pieces(self) -> AsyncIterator[bytes]:
        half = len(self.content) // 2
        yield self.content[:half]
        self.half_sent.set()
        await self.go_on.wait()
        yield self.content[half:]


async def bytes_in(folder: Path, pattern: str) -> None:
    async with asyncio.timeout(HUNG):
        while not any(path.stat().st_size for path in folder.glob(pattern)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("announced", [True, False])
async def test_files_that_come_at_once_pass_no_quota_together(start_daemon: StartDaemon, announced: bool) -> None:
    daemon = await start_daemon(models_quota=LIMIT)
    slow, other = Slow(b"1" * (LIMIT // 4 * 3)), b"2" * (LIMIT // 4 * (2 if announced else 3))
    headers = {"Content-Length": str(len(slow.content))} if announced else {}

    async def send(content: bytes, data: Any, headers: dict[str, str]) -> tuple[int, str]:
        place = f"/api/blobs/{digest_of(content)}"
        async with daemon.tcp.post(place, data=data, headers=headers) as answer:
            return answer.status, await answer.text()

    first = asyncio.create_task(send(slow.content, slow.pieces(), headers))
    await slow.half_sent.wait()
    await bytes_in(daemon.settings.data_dir / "partial", "*")
    status, said = await send(other, other, {})
    assert (status, "models_quota" in said, "promised to models on their way" in said) == (507, True, True)
    slow.go_on.set()
    assert (await first)[0] == 201
    assert (await send(other[: LIMIT // 4], other[: LIMIT // 4], {}))[0] == 201
    assert len(waiting(daemon)) == 2


async def test_an_archive_and_a_file_pass_no_quota_together(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models_quota=LIMIT)
    member = tarfile.TarInfo(f"blobs/sha256/{'a' * 64}")
    member.size = LIMIT // 4 * 3
    slow, other = Slow(member.tobuf() + bytes(member.size)), b"2" * (LIMIT // 2)

    async def load() -> str:
        async with daemon.unix.post("/models/load", data=slow.pieces()) as answer:
            return await answer.text()

    loading = asyncio.create_task(load())
    await slow.half_sent.wait()
    await bytes_in(daemon.settings.data_dir / "partial", "load-*/*")
    for status, said in ((507, "promised to models on their way"), (201, "")):
        async with daemon.tcp.post(f"/api/blobs/{digest_of(other)}", data=other) as answer:
            assert (answer.status, said in await answer.text()) == (status, True)
        slow.go_on.set()
        assert "damaged" in await loading


async def test_a_file_of_no_model_goes_after_a_day(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    for content in (b"old", b"new"):
        for path in waiting(daemon):
            os.utime(path, (time.time() - 90_000,) * 2)
        async with daemon.tcp.post(f"/api/blobs/{digest_of(content)}", data=content) as answer:
            assert answer.status == 201
    assert [path.name for path in waiting(daemon)] == [f"upload-{digest_of(b'new')[7:]}"]
