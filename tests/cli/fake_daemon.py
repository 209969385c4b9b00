"""A daemon of scripted answers: a real HTTP server, on a Unix socket or on TCP, that remembers what it was asked."""

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

from modelrunner.daemon.certificates import self_signed
from tests.waiting import HUNG

READY = {"status": "ready", "uptime_seconds": 1.0, "active_requests": 0, "version": "0.1.0"}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Status:
    """An answer with a status, and an error object of the daemon's."""

    status: int
    code: str = "some_error"
    message: str = "it went wrong: try something else"
    headers: dict[str, str] = field(default_factory=dict)

    def content(self) -> bytes:
        fault = {"message": self.message, "type": "server_error", "param": None, "code": self.code}
        return json.dumps({"error": fault, "request_id": "1"}).encode()


@dataclass(frozen=True)
class Text:
    """An answer in these very bytes."""

    content: bytes
    status: int = 200


@dataclass(frozen=True)
class Stream:
    """A chunked answer, piece by piece. `broken` ends it without its last chunk; before the end, `hold` is called
    with the handler, while the client waits for more; `then` are the pieces after that."""

    pieces: list[bytes]
    kind: str = "text/event-stream"
    broken: bool = False
    hold: Callable[["Handler"], object] | None = None
    then: list[bytes] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)


def events(*data: Any, **options: Any) -> Stream:
    """With "[DONE]" at its end, unless it does not come so far."""
    done = options.pop("done", not options.get("broken") and not options.get("hold"))
    pieces = [f"data: {json.dumps(item)}\n\n".encode() for item in data]
    return Stream(pieces + ([b"data: [DONE]\n\n"] if done else []), **options)


def words(*texts: str, **options: Any) -> Stream:
    """A chat completion that says them one after the other."""
    return events(*({"choices": [{"delta": {"content": text}}]} for text in texts), **options)


def lines(*items: Any, **options: Any) -> Stream:
    return Stream([json.dumps(item).encode() + b"\n" for item in items], "application/x-ndjson", **options)


class Handler(BaseHTTPRequestHandler):
    server: "_Server"
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "local"

    def log_message(self, format: str, *args: Any) -> None:
        """Tests look at `FakeDaemon.requests`."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def do_GET(self) -> None:
        daemon = self.server.daemon
        length = int(self.headers.get("Content-Length") or 0)
        sent = self.rfile.read(length) if length else b""
        is_json = self.headers.get("Content-Type", "").startswith("application/json")
        body = (json.loads(sent) if is_json else sent) if sent else None
        request = Request(self.command, self.path, dict(self.headers.items()), body)
        daemon.requests.append(request)
        answer = daemon.answers.get(f"{self.command} {self.path}", Status(404, "route_not_found", "no such route"))
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, list) and answer and isinstance(answer[0], Status | Stream | Text):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        match answer:
            case Stream():
                self._stream(answer)
            case Status():
                self._whole(answer.status, answer.content(), answer.headers)
            case Text():
                self._whole(answer.status, answer.content, {})
            case _:
                self._whole(200, json.dumps(answer).encode(), {})

    do_POST = do_DELETE = do_GET

    def _whole(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, answer: Stream) -> None:
        self.send_response(200)
        for name, value in {
            "Content-Type": answer.kind,
            "Transfer-Encoding": "chunked",
            "Connection": "close",
            **answer.headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self._write(answer.pieces)
        if answer.hold:
            answer.hold(self)
        self._write(answer.then)
        if not answer.broken:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _write(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

    def wait_for_client_to_leave(self) -> None:
        """Returns once the client has closed its connection."""
        self.server.daemon.waits.set()
        self.connection.settimeout(HUNG)
        if self.connection.recv(1) == b"":
            self.server.daemon.left.set()


class _Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = False
    daemon: "FakeDaemon"


class _TcpServer(_Server):
    address_family = socket.AF_INET


class FakeDaemon:
    """`answers` maps "METHOD /path" to a JSON value, a `Status`, a `Text` or a `Stream`; or to a list that begins with
    one of the latter, of which each request gets the next and the last one stays. `waits` and `left` tell about
    `wait_for_client_to_leave`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, Any] = {"GET /health": READY}
        self.requests: list[Request] = []
        self.waits = threading.Event()
        self.left = threading.Event()

    def asked(self, method: str, path: str) -> list[Any]:
        """The bodies of the requests to a route."""
        return [r.body for r in self.requests if (r.method, r.path) == (method, path)]


@contextmanager
def fake_daemon(path: Path | None = None, tls: Path | None = None) -> Iterator[FakeDaemon]:
    """On the Unix socket `path`, or on a free TCP port, over TLS with a certificate in the folder `tls`."""
    server: Any = _Server(str(path), Handler) if path else _TcpServer(("127.0.0.1", 0), Handler)  # type: ignore[arg-type]
    url = f"unix://{path}" if path else f"http://127.0.0.1:{server.server_address[1]}"
    if tls:
        certificate = self_signed(tls, ())
        server.socket = certificate.current().wrap_socket(server.socket, server_side=True)
        url = f"https{url.removeprefix('http')}#{certificate.fingerprint}"
    server.daemon = FakeDaemon(url)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.daemon
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
