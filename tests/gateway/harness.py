"""A proxy that listens as the daemon does, and a client that speaks raw bytes and reads answers strictly (h11)."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import h11
import msgspec
from aiohttp import web

from modelrunner.api.middleware import RequestEnvelope, connections, finish_head
from modelrunner.api.revocation import Revocation
from modelrunner.api.ui_routes import UiRoutes
from modelrunner.daemon.certificates import self_signed
from modelrunner.gateway.access import Access, host_names
from modelrunner.gateway.connection.server import InferenceServer
from modelrunner.gateway.request.observers import Observers
from modelrunner.gateway.request.pipeline import Pipeline
from modelrunner.http.limits import Limits
from modelrunner.keys.ring import KeyRing
from modelrunner.web.session import public_only
from tests.gateway.fakes import (
    FakeResolver,
    FakeRunner,
    FakeScheduler,
    Script,
    ScriptedEngine,
    answer_ok,
    scripted_engine,
)
from tests.waiting import HUNG

CHAT = "/v1/chat/completions"
WRITTEN = web.AppKey("written", list[int])


def request(
    path: str = CHAT, body: Any = None, *, method: str = "POST", stream: bool = False, http: str = "1.1", **headers: str
) -> bytes:
    """A request in bytes. `body` is encoded unless it is bytes; the default asks model m. Header names are written with
    underscores; `Host` may be left out with an empty text."""
    if body is None:
        body = {"model": "m", "messages": []} | ({"stream": True} if stream else {})
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    fields = {"Host": "test", "Content-Length": str(len(data))} | {k.replace("_", "-"): v for k, v in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"{method} {path} HTTP/{http}\r\n{lines}\r\n".encode("latin-1") + data


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = b""
    complete: bool = False
    """False where the connection ended in the middle."""

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json()
        assert set(found) == {"error", "request_id"}
        assert {"message", "type", "param", "code"} <= set(found["error"])
        assert found["request_id"] == self.headers["x-request-id"]
        return dict(found["error"])


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    parser: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))

    async def send(self, data: bytes) -> Self:
        if self.writer.is_closing():
            raise ConnectionResetError("the other side has closed")  # for which uvloop has a RuntimeError
        self.writer.write(data)
        await self.writer.drain()
        return self

    async def ask(self, data: bytes | None = None) -> Answer:
        await self.send(request() if data is None else data)
        return await self.answer()

    def expect(self) -> None:
        """Makes the parser ready for the answer to one more request; what that was does not matter to it."""
        if self.parser.our_state is h11.DONE and self.parser.their_state is h11.DONE:
            self.parser.start_next_cycle()
        if self.parser.our_state is h11.IDLE:
            self.parser.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
            self.parser.send(h11.EndOfMessage())

    async def head(self) -> Answer:
        self.expect()
        async with asyncio.timeout(HUNG):
            while True:
                event = await self._event()
                if isinstance(event, h11.Response):
                    return Answer(event.status_code, {k.decode(): v.decode() for k, v in event.headers})

    async def more(self, answer: Answer) -> bytes:
        """The next piece of the body; b"" at its end."""
        async with asyncio.timeout(HUNG):
            try:
                event = await self._event()
            except (h11.RemoteProtocolError, ConnectionError):
                return b""
        if isinstance(event, h11.Data):
            answer.body += bytes(event.data)
            return bytes(event.data)
        answer.complete = isinstance(event, h11.EndOfMessage)
        return b""

    async def answer(self) -> Answer:
        answer = await self.head()
        while await self.more(answer):
            pass
        return answer

    async def _event(self) -> Any:
        while (event := self.parser.next_event()) is h11.NEED_DATA:
            self.parser.receive_data(await self.reader.read(1 << 16))
        return event

    async def closed(self) -> bytes:
        """Waits until the other side closes; what came until then."""
        async with asyncio.timeout(HUNG):
            with suppress(ConnectionError):
                return await self.reader.read()
        return b""

    async def leave(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


@dataclass
class Proxy:
    engine: ScriptedEngine
    runner: FakeRunner
    scheduler: FakeScheduler
    pipeline: Pipeline
    lanes: dict[str, InferenceServer]
    path: Path
    port: int
    kind: str
    written: list[int]
    """Bytes that /lines has written."""
    clients: list[Client] = field(default_factory=list)

    async def connect(self, *, tcp: bool = False) -> Client:
        """On the kind of lane under test: for aiohttp's, the connection first asks for something that is not
        inference."""
        if self.kind == "tls":
            trust = ssl.create_default_context(cafile=str(self.path.parent / "certificate.pem"))
            client = Client(*await asyncio.open_connection("127.0.0.1", self.port, ssl=trust))
        elif tcp:
            client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        else:
            client = Client(*await asyncio.open_unix_connection(str(self.path)))
        self.clients.append(client)
        if self.kind == "aiohttp":
            host = f"127.0.0.1:{self.port}" if tcp else "test"
            assert (await client.ask(request("/health", b"", method="GET", Host=host))).status == 200
        return client

    async def ask(self, data: bytes | None = None, *, tcp: bool = False) -> Answer:
        client = await self.connect(tcp=tcp)
        try:
            return await client.ask(data)
        finally:
            await client.leave()

    def look(self, ahead: float) -> None:
        """Lets the listeners look for what has taken too long, as if it were `ahead` seconds later."""
        now = asyncio.get_running_loop().time() + ahead
        for lane in self.lanes.values():
            for connection in list(lane.listener._connections):
                connection.check(now)

    def unsent(self) -> int:
        """Bytes of answers that wait in this process for clients that do not read."""
        connections = [connection for lane in self.lanes.values() for connection in lane.listener._connections]
        return sum(connection._transport.get_write_buffer_size() for connection in connections)  # type: ignore[attr-defined]

    def host(self) -> str:
        return f"127.0.0.1:{self.port}"


def only(**limits: float) -> Limits:
    """Limits of which the times are far away, but for those that are given: what ends then ends for its own reason."""
    times = ("header_timeout", "body_idle", "idle", "write_stall", "progress_after", "comment_every")
    return Limits(**{**dict.fromkeys(times, 100 * HUNG), "check_every": 0.02, **limits})  # type: ignore[arg-type]


async def _health(request: web.Request) -> web.Response:
    await request.read()
    return web.json_response({"status": "ready"})


async def _headers(request: web.Request) -> web.Response:
    await request.read()
    return web.json_response(sorted(name.lower() for name in request.headers))


async def _unread(request: web.Request) -> web.Response:
    """Answers after `?size=` bytes of the body."""
    wanted = int(request.query.get("size", 0))
    while wanted > 0:
        wanted -= len(await request.content.read(wanted))
    return web.json_response({})


async def _public_only(request: web.Request) -> web.Response:
    return web.json_response(public_only.get())


async def _large(request: web.Request) -> web.Response:
    """A body of 4 MiB in one piece."""
    return web.Response(body=b"x" * (4 << 20))


async def _lines(request: web.Request) -> web.StreamResponse:
    """A line, `?count=` times; `written` of the application counts their bytes."""
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(int(request.query["count"])):
        await response.write(b"x" * 9999 + b"\n")
        request.app[WRITTEN][0] += 10000
    if "fault" in request.query:
        raise RuntimeError("a fault")
    await response.write_eof()
    return response


@asynccontextmanager
async def proxy(
    folder: Path,
    kind: str,
    script: Script = answer_ok,
    *,
    limits: Limits | None = None,
    origins: tuple[str, ...] = (),
    remote: bool = False,
    routes: Sequence[web.RouteDef] = (),
) -> AsyncIterator[Proxy]:
    """`remote`: the engine is one of another host. `routes` are further ones of the control plane."""
    loop = asyncio.get_running_loop()
    async with scripted_engine(folder / "engine.sock", script, remote=remote) as engine:
        runner = FakeRunner(engine.endpoint)
        scheduler = FakeScheduler(runner)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        access = Access(host_names(port, ("test:*", "x:*") if kind == "tls" else ()), origins)
        pipeline = Pipeline(FakeResolver(), scheduler, access, limits or only())  # type: ignore[arg-type]
        revocation = Revocation(pipeline, KeyRing(folder / "keys.json"))
        envelope = RequestEnvelope(lambda: False, pipeline.addresses, Observers(), revocation)
        app = web.Application(middlewares=[envelope.handle])
        app.on_response_prepare.append(finish_head)
        app.add_routes([web.get("/health", _health), web.post("/other", _health)])
        app.add_routes([web.post("/headers", _headers), web.post("/unread", _unread), web.get("/lines", _lines)])
        app.add_routes([web.get("/large", _large), web.get("/public", _public_only), *UiRoutes().routes(), *routes])
        app[WRITTEN] = written = [0]
        served = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await served.setup()
        assert served.server is not None
        fallback = connections(served.server, pipeline.limits)
        tls = self_signed(folder, ()).current if kind == "tls" else None
        lanes = {
            "unix": InferenceServer(pipeline, fallback, local=True),
            "tcp": InferenceServer(pipeline, fallback, local=False, tls=tls),
        }
        servers = [
            await loop.create_unix_server(lanes["unix"], str(folder / "proxy.sock")),
            await loop.create_server(lanes["tcp"], sock=listener),
        ]
        made = Proxy(engine, runner, scheduler, pipeline, lanes, folder / "proxy.sock", port, kind, written)
        try:
            yield made
        finally:
            for client in made.clients:
                await client.leave()
            for server in servers:
                server.close()
            await served.cleanup()
            runner.abandoned.end()
            runner.upstream.close()
            async with asyncio.timeout(HUNG):
                while any(len(lane.listener) for lane in lanes.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert (len(pipeline.running), pipeline.in_flight.buffered, scheduler.leases, scheduler.waiting) == (
                0,
                0,
                0,
                0,
            )
