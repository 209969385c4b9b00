"""Bodies that are no JSON pass to the engine as they came: forms with a file, and anything else."""

import asyncio
import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

from modelrunner.engine.connections import UpstreamPool
from modelrunner.engineapi import ApiShape, EndpointApi, EngineApi
from modelrunner.errors import BadRequest
from modelrunner.gateway import routes
from modelrunner.gateway.calls import Call as EngineCall
from modelrunner.gateway.calls import Fields
from modelrunner.gateway.connection.decode import Decoding
from modelrunner.gateway.multipart import FormWord, words_of
from modelrunner.gateway.uploads import IN_MEMORY, RequestUpload
from modelrunner.types import Endpoint, Mode
from tests.conftest import open_files
from tests.gateway import fakes
from tests.gateway.fakes import OK, SSE, Call, FakeRunner, event, scripted_engine, until
from tests.gateway.harness import Proxy, only, proxy
from tests.opened import opened_in
from tests.waiting import HUNG

FORM, BYTES = "/v1/test/form", "/v1/test/bytes"
TYPE = "multipart/form-data; boundary=frontier"
SOUND = bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a backend whose engine takes a form with a file, and bytes."""
    monkeypatch.setattr(routes, "_families", [*routes._families])
    monkeypatch.setattr(routes, "_routes", {**routes._routes})
    routes.add_calls({path: EngineCall(Mode.COMPLETION, path, uploads=True) for path in (FORM, BYTES)})


def part(name: str, data: bytes, file: str = "") -> bytes:
    named = f'; filename="{file}"' if file else ""
    head = f'--frontier\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + data + b"\r\n"


def headed(head: bytes, data: bytes = b"other") -> bytes:
    """A part with a head that the test writes."""
    return b"--frontier\r\n" + head + b"\r\n\r\n" + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--frontier--\r\n"


def post(path: str, body: bytes, kind: str = TYPE) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()


def serves_sounds(served: Proxy) -> None:
    shapes = {FORM: EndpointApi(ApiShape.TRANSCRIPTION), BYTES: EndpointApi(ApiShape.OPAQUE)}
    served.runner.api = EngineApi(endpoints=shapes)


@pytest.mark.parametrize("first", [True, False])
async def test_a_form_passes_with_its_model_before_or_after_its_file(folder: Path, kind: str, first: bool) -> None:
    model, file = part("model", b"m"), part("file", SOUND, "a.wav")
    body = form(model, file) if first else form(file, part("language", b"en"), model)
    async with proxy(folder, kind) as served:
        serves_sounds(served)
        answer = await served.ask(post(FORM, body) + body)
        assert answer.status == 200, answer.body
        [received] = served.engine.received
        assert (received.path, received.header("content-type"), received.body) == (FORM, TYPE, body)


async def test_any_other_body_passes_with_its_model_in_the_query(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        serves_sounds(served)
        answer = await served.ask(post(f"{BYTES}?model=m", SOUND, "audio/wav") + SOUND)
        assert answer.status == 200, answer.body
        [received] = served.engine.received
        assert (received.path, received.header("content-type"), received.body) == (BYTES, "audio/wav", SOUND)
        assert (await served.ask(post(BYTES, SOUND, "audio/wav") + SOUND)).status == 400


@pytest.mark.parametrize(("media", "told"), [(b"text/event-stream", True), (b"audio/wav", False)])
async def test_a_stream_that_a_form_asked_for_fails_with_an_event(folder: Path, media: bytes, told: bool) -> None:
    """The form alone says that it asks for one."""

    async def script(call: Call) -> None:
        await call.send(SSE.replace(b"text/event-stream", media) + event("a"))
        call.close()

    body = form(part("model", b"m"), part("stream", b"true"), part("file", SOUND, "a.wav"))
    async with proxy(folder, "fast", script) as served:
        serves_sounds(served)
        answer = await served.ask(post(FORM, body) + body)
        assert (answer.status, answer.complete) == (200, told)
        assert answer.body.partition(b"data: a\n\n")[2].startswith(b'event: error\ndata: {"error":{') == told


async def test_the_engines_own_name_takes_the_place_of_the_clients(folder: Path) -> None:
    body = form(part("file", SOUND, "a.wav"), part("model", b"m"), part("language", b"en"))
    async with proxy(folder, "fast") as served:
        serves_sounds(served)
        served.runner.names = ("docker.io/ai/m:latest",)
        assert (await served.ask(post(FORM, body) + body)).status == 200
        expected = form(part("file", SOUND, "a.wav"), part("model", b"docker.io/ai/m:latest"), part("language", b"en"))
        assert served.engine.received[0].body == expected


@pytest.mark.parametrize(("lacks", "stream"), [(True, b"false"), (True, b"true"), (False, b"")])
async def test_the_text_of_a_sound_is_made_of_json_for_an_engine_without_it(
    folder: Path, kind: str, lacks: bool, stream: bytes
) -> None:
    data = b'{"text": "gr\xc3\xb6\xc3\x9fer", "usage": {"type": "tokens"}}'

    async def script(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        await call.send(head + data)

    more = part("stream", stream), part("file", SOUND, "a.wav"), part("model", b"m")
    body = form(part("response_format", b"text"), *more)
    async with proxy(folder, kind, script) as served:
        served.runner.api = EngineApi(endpoints={FORM: EndpointApi(ApiShape.TRANSCRIPTION, lacks_text=lacks)})
        served.runner.names = ("another",)
        answer = await served.ask(post(FORM, body) + body)
        made = lacks and stream == b"false"
        asked = form(part("response_format", b"json" if made else b"text"), *more[:2], part("model", b"another"))
        assert served.engine.received[0].body == asked
        told = "text/plain; charset=utf-8" if made else "application/json"
        assert (answer.status, answer.headers["content-type"]) == (200, told)
        assert answer.body == ("größer\n".encode() if made else data)


async def test_a_large_body_is_never_whole_in_memory(folder: Path) -> None:
    """Neither while it comes nor while it goes; and no file is left."""
    size = 160 << 20
    start, end = part("model", b"m") + part("file", b"")[:-2], b"\r\n--frontier--\r\n"
    whole = len(start) + size + len(end)
    taken = 0

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        await reader.readuntil(b"\r\n\r\n")
        while taken < whole:
            taken += len(await reader.read(1 << 16))
        writer.write(OK)
        await writer.drain()
        writer.close()

    engine = await asyncio.start_unix_server(take, str(folder / "slow.sock"))
    async with engine, proxy(folder, "fast", limits=only(body=1, total_body=2 * IN_MEMORY, upload=size * 2)) as served:
        serves_sounds(served)
        served.pipeline.spool = folder
        served.runner.upstream = UpstreamPool(Endpoint(path=folder / "slow.sock"))
        client, piece = await served.connect(), os.urandom(1 << 20)
        before = most = resident()
        head = post(FORM, b"").replace(b"Content-Length: 0", b"Content-Length: %d" % whole)
        await client.send(head + start)
        for _ in range(size >> 20):
            await client.send(piece)
            most = max(most, resident())
        await client.send(end)
        answering = asyncio.create_task(client.answer())
        while not answering.done():
            most = max(most, resident())
            await asyncio.sleep(0.001)
        assert ((await answering).status, taken) == (200, whole)
        assert most - before < 64 << 20
        await until(lambda: served.pipeline.in_flight.buffered == 0)
        served.runner.upstream.close()
    assert not [file for file in folder.iterdir() if file.is_file()]


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at the descriptors of this process")
async def test_a_piece_is_freed_as_soon_as_it_is_on_the_disk(folder: Path) -> None:
    """On a busy machine, a thread may keep for long what it was given."""
    upload, whole, written = RequestUpload(folder, lambda held: None), asyncio.Event(), list[int]()

    class Piece(bytes):
        def __del__(self) -> None:
            [file] = [number for number, what in open_files().items() if what.startswith(f"{folder}/")]
            written.append(os.stat(file).st_size >> 20)

    for _ in range(9):
        upload.add(Piece(1 << 20))
    upload.end(lambda error: whole.set())
    async with asyncio.timeout(HUNG):
        await whole.wait()
    upload.close()
    assert (IN_MEMORY >> 20, written) == (8, [*range(1, 10)])


async def test_a_file_has_a_limit_of_its_own(folder: Path, kind: str) -> None:
    """One that is too large is refused by its head; so is one for which the others leave no room."""
    head = post(FORM, b"").replace(b"Content-Length: 0", b"Content-Length: %d")
    async with proxy(folder, kind, limits=only(body=1, upload=1000)) as served:
        serves_sounds(served)
        answer = await served.ask(head % 1001)
        assert (answer.status, b"upload_limit allows 1000" in answer.body) == (413, True)
        body = form(part("model", b"m"), part("file", b"sound", "a.wav"))
        assert (await served.ask(post(FORM, body) + body)).status == 200
        others = [await served.connect() for _ in range(8)]
        for other in others:
            await other.send(head % 1000 + bytes(990))
        await until(lambda: served.pipeline.in_flight.uploaded == 8 * 990)
        assert (await served.ask(post(FORM, body) + body)).status == 503
        for other in others:
            await other.leave()
        await until(lambda: served.pipeline.in_flight.uploaded == 0)
        assert (await served.ask(post(FORM, body) + body)).status == 200


def resident() -> int:
    """The memory of this process, in bytes."""
    return psutil.Process().memory_info().rss


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(folder: Path) -> None:
    start = part("model", b"m") + part("file", b"")[:-2]
    head = post(FORM, b"").replace(b"Content-Length: 0", b"Content-Length: %d" % (30 << 20))
    async with proxy(folder, "fast") as served:
        serves_sounds(served)
        served.pipeline.spool = folder
        client = await served.connect()
        await client.send(head + start + bytes(12 << 20))
        await until(lambda: served.pipeline.in_flight.uploaded > 12 << 20)
        assert served.pipeline.in_flight.buffered == IN_MEMORY
        await client.leave()
        await until(lambda: served.pipeline.in_flight.uploaded == served.pipeline.in_flight.buffered == 0)
        await until(lambda: not any(what.startswith(f"{folder}/") for what in open_files().values()))
        assert not served.engine.received


@pytest.mark.parametrize("more", [-7, 1000])
async def test_a_length_that_lies(folder: Path, kind: str, more: int) -> None:
    """Nothing of it reaches the engine, and the next form does."""
    body = form(part("model", b"m"), part("file", SOUND, "a.wav"))
    head = post(FORM, b"").replace(b"Content-Length: 0", b"Content-Length: %d" % (len(body) + more))
    async with proxy(folder, kind, limits=only(body_idle=0.1)) as served:
        serves_sounds(served)
        client = await served.connect()
        await client.send(head + body)
        if more < 0:
            answer = await client.answer()
            assert (answer.status, "the form is cut" in answer.error["message"]) == (400, True)
            await client.leave()
        else:
            assert await client.closed() == b""
        await until(lambda: served.pipeline.in_flight.uploaded == served.pipeline.in_flight.buffered == 0)
        assert not served.engine.received
        assert (await served.ask(post(FORM, body) + body)).status == 200


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (part("model", b"m") + part("file", SOUND, "a.wav"), "its last boundary is missing"),
        (form(headed(b"Content-Type: audio/wav"), part("model", b"m")), "malformed head"),
        (form(headed(b"Content-Disposition: form-data"), part("model", b"m")), "malformed head"),
        (form(part("file", SOUND, "a.wav")), "no part `model`"),
    ],
)
async def test_a_wrong_form_is_refused_and_the_connection_goes_on(
    folder: Path, kind: str, wrong: bytes, said: str
) -> None:
    right = form(part("model", b"m"), part("file", SOUND, "a.wav"))
    async with proxy(folder, kind) as served:
        serves_sounds(served)
        client = await served.connect()
        answer = await client.ask(post(FORM, wrong) + wrong)
        assert (answer.status, said in answer.error["message"]) == (400, True)
        assert not served.engine.received
        assert (await client.ask(post(FORM, right) + right)).status == 200


@pytest.mark.parametrize("name", ["../../stray", "{folder}/stray", "sub/stray", ".."])
async def test_the_name_of_a_file_is_no_place(folder: Path, name: str) -> None:
    """It passes to the engine; what is kept of the body has no name."""
    name = name.format(folder=folder)
    body = form(part("model", b"m"), part("file", bytes(IN_MEMORY + 1), name))
    async with proxy(folder, "fast") as served:
        serves_sounds(served)
        served.pipeline.spool = folder
        with opened_in(folder.parent) as opened:
            assert (await served.ask(post(FORM, body) + body)).status == 200
        assert opened
        assert {path for path in opened if Path(path) != folder and Path(path).parent != folder} == set()
        assert [received.body == body for received in served.engine.received] == [True]
    assert not [*folder.parent.rglob("stray")]


async def test_an_engine_that_dies_during_an_upload_leaves_the_whole_to_the_next(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has got a part. The client sent its body once, and gets one answer."""
    body = form(part("model", b"m"), part("file", os.urandom(9 << 20), "a.wav"))

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1 << 20)
        served.runner.die()
        served.scheduler.runner = spare
        writer.transport.abort()

    engine = await asyncio.start_unix_server(die, str(folder / "dying.sock"))
    async with engine, proxy(folder, kind) as served, scripted_engine(folder / "spare.sock") as second:
        serves_sounds(served)
        served.pipeline.spool = folder
        served.runner.upstream = UpstreamPool(Endpoint(path=folder / "dying.sock"))
        spare = FakeRunner(second.endpoint)
        spare.api = served.runner.api
        monkeypatch.setattr(fakes, "FAKE_API", spare.api)
        answer = await served.ask(post(FORM, body) + body)
        assert (answer.status, answer.body) == (200, b'{"ok":true}')
        assert [received.body == body for received in second.received] == [True]
        assert (served.scheduler.granted, served.scheduler.leases) == (2, 0)
        await until(lambda: served.pipeline.in_flight.buffered == 0)
        spare.upstream.close()


async def test_a_client_that_leaves_closes_no_file_that_a_thread_reads(folder: Path) -> None:
    """The number of the file could already be another's, whose bytes the thread would take."""
    begun, go_on = threading.Event(), threading.Event()
    upload, given_up = RequestUpload(folder, lambda held: None), asyncio.Event()
    upload.add(SOUND)

    def read() -> Fields:
        begun.set()
        go_on.wait(HUNG)
        return Fields("m")

    work = Decoding(upload, read, lambda fields: None, given_up.set)
    await asyncio.to_thread(begun.wait, HUNG)
    work.cancel()
    assert not given_up.is_set()
    go_on.set()
    async with asyncio.timeout(HUNG):
        await given_up.wait()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        form(part("file", SOUND)),
        form(part("model", b"m"), part("model", b"m")),
        form(part("response_format", b"text"), part("response_format", b"json"), part("model", b"m")),
        form(part("model", b"m" * 2000)),
        form(part("model", b"\xff")),
        part("model", b"m"),
        form(*[part("x", b"")] * 10_000, part("model", b"m")),
        form(headed(b"Content-Disposition: form-data; name*=utf-8''model"), part("model", b"m")),
        form(headed(b'Content-Disposition: form-data; name="mo\\del"'), part("model", b"m")),
        form(headed(b'Content-Disposition: form-data; name = "model"'), part("model", b"m")),
        form(headed(b'Content-Disposition: form-data;\r\n name="model"'), part("model", b"m")),
        form(headed(b'Content-Disposition: form-data; name="x"; name="model"'), part("model", b"m")),
        form(headed(b'Content-Disposition: form-data; filename="a"; name="model"; "'), part("model", b"m")),
        form(headed(b'Content-Disposition : form-data; name="model"'), part("model", b"m")),
        form(headed(b'Content-Disposition: form-data; name="x"\r\n' * 2), part("model", b"m")),
        form(part("x", b"\n--frontier\n" + part("model", b"other")), part("model", b"m")),
        form(headed(b'Content-Disposition: form-data; name="x"')[:-7] + part("model", b"other"), part("model", b"m")),
        b"preamble\n" + form(part("model", b"m")),
    ],
)
def test_a_form_that_two_readers_may_read_differently_is_refused(body: bytes) -> None:
    for size in (1 << 16, 5):
        with pytest.raises(BadRequest):
            words_of(TYPE, [body[at : at + size] for at in range(0, len(body), size)])


@pytest.mark.parametrize("kind", [TYPE + "; boundary=other", f'{TYPE[:20]}a="; boundary=frontier"; boundary=other'])
def test_a_form_with_two_boundaries_is_refused(kind: str) -> None:
    with pytest.raises(BadRequest):
        words_of(kind, [form(part("model", b"m"))])


@pytest.mark.parametrize(
    "disposition",
    [
        'form-data; name="model"',
        "form-data; name=model",
        'Form-Data;name="model";',
        'form-data; filename="; name=file"; name="model"',
        'form-data; name="model"; filename="größe \\"a\\".wav"; filename*=UTF-8\'\'gr%C3%B6%C3%9Fe.wav',
    ],
)
def test_a_part_is_named_as_http_libraries_name_it(disposition: str) -> None:
    body = form(headed(f"Content-Disposition: {disposition}".encode(), "größe".encode()))
    assert words_of(TYPE, [body])["model"].text == "größe"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1 << 16])
def test_the_model_is_found_however_the_form_comes_in_pieces(size: int) -> None:
    """A line that looks like a boundary and is none, a part without a byte, a file with its own line ends, and other
    parts that are too long for a word, or none."""
    tricky = b"\r\n--fron\r\n--\r\nmodel\r\n\r\n" + SOUND
    body = form(part("empty", b""), part("file", tricky, "model"), part("model", "größe".encode()), part("x", b"y"))
    body = form(part("response_format", b"y" * 9999), part("stream", b"\xff"), body[: -len(form())])
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    start = body.index("größe".encode())
    assert words_of(TYPE, pieces) == {"model": FormWord("größe", start, start + len("größe".encode()))}
