import _thread
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelrunner import wire
from modelrunner.cli.client import HttpClient, ServerEvent, path
from modelrunner.errors import (
    AnswerBroken,
    BadRequest,
    DaemonUnreachable,
    ModelNotFound,
    ModelRunnerError,
    NotFound,
    TimedOut,
)
from tests.cli.fake_daemon import FakeDaemon, Handler, Status, Stream, Text, fake_daemon, lines
from tests.waiting import HUNG


@pytest.fixture(params=["unix", "tcp", "tls"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeDaemon]:
    path = tmp_path / "d.sock" if request.param == "unix" else None
    with fake_daemon(path, tmp_path if request.param == "tls" else None) as daemon:
        yield daemon


def events(client: HttpClient) -> list[ServerEvent]:
    with client.open("POST", "/events", {}) as response:
        return list(client.events(response))


def test_a_call_sends_json_and_the_key_and_decodes_the_answer(daemon: FakeDaemon) -> None:
    daemon.answers["POST /x"] = {"status": "ready", "uptime_seconds": 1, "active_requests": 2, "version": "3"}
    assert HttpClient(daemon.url, key="secret").call("POST", "/x", wire.Health, {"a": [1]}) == wire.Health(
        "ready", 1, 2, "3"
    )
    [request] = daemon.requests
    assert request.body == {"a": [1]}
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["Authorization"] == "Bearer secret"


def test_without_a_key_none_is_sent(daemon: FakeDaemon) -> None:
    daemon.answers["GET /x"] = 1
    HttpClient(daemon.url).fetch("GET", "/x")
    assert "Authorization" not in daemon.requests[0].headers


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (Status(404, "model_not_found", "no such model"), ModelNotFound, "no such model"),
        (Status(404, "runner_not_found", "no such runner"), NotFound, "no such runner"),
        (Status(409, "in_use", "it is in use"), ModelRunnerError, "it is in use"),
        (Text(b"<html>not found</html>", 404), AnswerBroken, "not as a modelrunner daemon"),
        (Text(b"[1]"), AnswerBroken, "cannot be parsed"),
    ],
)
def test_refusals_become_errors(daemon: FakeDaemon, answer: object, kind: type[ModelRunnerError], message: str) -> None:
    daemon.answers["GET /x"] = answer
    with pytest.raises(kind, match=message):
        HttpClient(daemon.url).call("GET", "/x", wire.Health)


def test_retry_after_is_kept(daemon: FakeDaemon) -> None:
    daemon.answers["GET /x"] = Status(503, headers={"Retry-After": "7"})
    with pytest.raises(ModelRunnerError) as caught:
        HttpClient(daemon.url).fetch("GET", "/x")
    assert caught.value.retry_after == 7


def test_silence_is_limited(daemon: FakeDaemon) -> None:
    daemon.answers["GET /x"] = Stream([], hold=Handler.wait_for_client_to_leave)
    with pytest.raises(TimedOut):
        HttpClient(daemon.url).fetch("GET", "/x", timeout=0.05)
    assert daemon.left.wait(HUNG)


@pytest.mark.parametrize(
    "host",
    [
        *("unix:///nowhere/d.sock", "http://127.0.0.1:1", "unix:///" + "x" * 200),
        *("http://a..example:1", f"http://{'x' * 64}.example:1"),
    ],
)
def test_nobody_there(host: str) -> None:
    with pytest.raises(DaemonUnreachable, match="modelrunner serve"):
        HttpClient(host).fetch("GET", "/health")


@pytest.mark.parametrize(
    "host", ["", "localhost:1", "unix://x", "ftp://x", "http://", "http://x:port", "unix:", "http://[::1"]
)
def test_an_address_of_another_kind_is_refused(host: str) -> None:
    with pytest.raises(BadRequest, match="unix:///path"):
        HttpClient(host)


@pytest.mark.parametrize("key", ["two\nlines", "two words", "ключ", "\x7f"])
def test_a_key_that_no_header_can_have_is_refused(key: str) -> None:
    with pytest.raises(BadRequest, match="MODELRUNNER_API_KEY") as raised:
        HttpClient("http://127.0.0.1:1", key=key)
    assert key not in str(raised.value)


def test_events_are_put_together_from_any_pieces(daemon: FakeDaemon) -> None:
    whole = ': hello\r\n\ndata: 1\n\nevent: stage\ndata:a\ndata: b\n\ndata: "ä"\r\n\r\n'.encode()
    expected = [ServerEvent("message", "1"), ServerEvent("stage", "a\nb"), ServerEvent("message", '"ä"')]
    for size in (1, 3, len(whole)):
        daemon.answers["POST /events"] = Stream([whole[i : i + size] for i in range(0, len(whole), size)])
        assert events(HttpClient(daemon.url)) == expected


def test_a_stream_that_breaks_off_is_an_error(daemon: FakeDaemon) -> None:
    daemon.answers["POST /events"] = Stream([b"data: 1\n\n"], broken=True)
    with pytest.raises(AnswerBroken, match="broke off"):
        events(HttpClient(daemon.url))


def test_leaving_the_block_closes_the_connection(daemon: FakeDaemon) -> None:
    daemon.answers["POST /events"] = Stream([b"data: 1\n\n"], hold=Handler.wait_for_client_to_leave)
    client = HttpClient(daemon.url)
    with client.open("POST", "/events", {}) as response:
        assert next(client.events(response)) == ServerEvent("message", "1")
    assert daemon.left.wait(HUNG)


def test_progress_ends_with_success_or_raises_the_error_of_its_line(daemon: FakeDaemon) -> None:
    start = {"type": "progress", "message": "downloading", "total": 10, "current": 5}
    daemon.answers["POST /work"] = lines(start, {"type": "success", "message": "done"})
    assert [line.type for line in HttpClient(daemon.url).progress("/work", {})] == ["progress", "success"]
    fault = {"message": "no such model there", "code": "model_not_found"}
    daemon.answers["POST /work"] = lines(start, {"type": "error", "message": "x", "error": fault})
    with pytest.raises(ModelNotFound, match="no such model there"):
        list(HttpClient(daemon.url).progress("/work", {}))


def test_a_refusal_is_read_though_the_body_was_not(tmp_path: Path) -> None:
    """A daemon that refuses a large body answers and closes before it has read it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "d.sock"))
        listener.listen()

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                content = Status(413, message="the body is too large").content()
                connection.sendall(b"HTTP/1.1 413 X\r\nContent-Length: %d\r\n\r\n" % len(content) + content)

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(ModelRunnerError, match="too large"):
            HttpClient(f"unix://{tmp_path}/d.sock").fetch("POST", "/x", "x" * (8 << 20))
        thread.join()


def test_references_are_one_path_segment() -> None:
    assert (
        path("models", "hf.co/a/b:Q4", "tag", repo="x:5/y", tag=None) == "/models/hf.co%2Fa%2Fb%3AQ4/tag?repo=x%3A5%2Fy"
    )


def test_an_answer_that_breaks_off_is_an_error_of_ours(daemon: FakeDaemon) -> None:
    daemon.answers["GET /x"] = Stream([b"1"], broken=True)
    with pytest.raises(AnswerBroken):
        HttpClient(daemon.url).fetch("GET", "/x")


def test_ctrl_c_is_heeded_when_it_comes_just_before_a_wait(daemon: FakeDaemon) -> None:
    """`interrupt_main` is such a Ctrl-C: it tells Python of a signal that interrupts no system call."""
    daemon.answers["POST /events"] = Stream([b"data: 1\n\n"], hold=Handler.wait_for_client_to_leave)
    client = HttpClient(daemon.url)
    with client.open("POST", "/events", {}) as response:
        found = client.events(response)
        assert next(found).data == "1"
        later = threading.Timer(0.2, _thread.interrupt_main)  # the main thread waits by then
        later.start()
        with pytest.raises(KeyboardInterrupt):
            next(found)
