"""The child process of engines that are Python packages, without the packages."""

import json
import os
import socket
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelrunner_llamacpp.inside import modelrunner_serve as serve


class Kind(IntEnum):
    AUTO = -1
    ON = 1


@pytest.mark.parametrize(
    ("current", "value", "expected"),
    [
        (0, 5, 5),
        ("", "/m", "/m"),
        (False, True, True),
        (Kind.AUTO, "ON", Kind.ON),
        ([Kind.AUTO], ["ON"], [Kind.ON]),
        (set(), "name", {"name"}),
        (["127.0.0.1"], "/run/x.sock", ["/run/x.sock"]),
        ([0.0] * 4, [3.0, 1.0], [3.0, 1.0, 0.0, 0.0]),
    ],
)
def test_values_take_the_form_of_the_attribute(current: Any, value: Any, expected: Any) -> None:
    target = SimpleNamespace(inner=SimpleNamespace(field=current))
    serve.set_attribute(target, "inner.field", value)
    assert target.inner.field == expected


def test_a_name_that_the_engine_does_not_have_is_an_error() -> None:
    with pytest.raises(AttributeError):
        serve.set_attribute(SimpleNamespace(), "unknown", 1)
    with pytest.raises(KeyError):
        serve.fitted(Kind.AUTO, "OFF")


def test_runs_where_modelrunner_is_not_installed() -> None:
    """By path, isolated, with the standard library alone; the missing engine is named."""
    code = [sys.executable, "-I", "-S", str(Path(serve.__file__)), "xllamacpp", json.dumps({})]
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No module named 'xllamacpp'" in done.stderr


def test_llama_cpp_python_gets_a_socket_that_is_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn would change the mode of one that it makes, and the sandbox lets no engine do that."""
    served = []

    def run(app: Any, *, fd: int, **_: Any) -> None:
        with socket.socket(fileno=os.dup(fd)) as listener:
            served.append((listener.family, listener.getsockname()))

    settings = SimpleNamespace(ModelSettings=SimpleNamespace, ServerSettings=SimpleNamespace)
    made = SimpleNamespace(add_api_route=lambda *_: None)
    app = SimpleNamespace(create_app=lambda **_: made, RequestIdPlugin=object)
    monkeypatch.setitem(sys.modules, "uvicorn", SimpleNamespace(run=run))
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "llama_cpp.server", SimpleNamespace(app=app))
    monkeypatch.setitem(sys.modules, "llama_cpp.server.settings", settings)
    path = str(tmp_path / "e.sock")
    serve.serve_llama_cpp({"settings": {"clip_model_path": None}, "host": path, "port": None})
    assert served == [(socket.AF_UNIX, path)]


async def passed(body: bytes, *, sees: bool) -> tuple[bytes, list[Any]]:
    """What a server behind `OwnParts` reads of a chat with this body, and what the client gets."""
    read, sent = bytearray(), []
    pieces = [{"type": "http.request", "body": body[:5], "more_body": True}, {"type": "http.request", "body": body[5:]}]

    async def server(scope: Any, receive: Any, send: Any) -> None:
        read.extend((await receive())["body"])

    async def receive() -> Any:
        return pieces.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await serve.OwnParts(server, sees=sees)({"type": "http", "path": "/v1/chat/completions"}, receive, send)
    return bytes(read), sent


def of_parts(*parts: object) -> bytes:
    return json.dumps({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]}).encode()


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
ELSEWHERE = {"type": "image_url", "image_url": {"url": "http://example.com/x.png"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}}


@pytest.mark.parametrize(
    ("body", "sees"),
    [
        (of_parts({"type": "text", "text": "x"}), False),
        (of_parts(IMAGE), True),
        *((wrong, False) for wrong in (b"{", b"[]", b"{}", b'{"messages": 1}', b'{"messages": ["x"]}')),
    ],
)
async def test_what_the_server_can_judge_reaches_it_whole(body: bytes, sees: bool) -> None:
    assert await passed(body, sees=sees) == (body, [])


@pytest.mark.parametrize(
    ("body", "sees", "said"),
    [
        (of_parts(IMAGE), False, "image input is not supported"),
        (of_parts(SOUND), True, "audio input is not supported"),
        (of_parts({"type": "odd"}), True, "this input is not supported"),
        (of_parts({"type": ["text"]}), True, "this input is not supported"),
        (of_parts(ELSEWHERE), True, "fetches no images"),
    ],
)
async def test_what_the_server_would_leave_out_is_refused(body: bytes, sees: bool, said: str) -> None:
    read, [start, end] = await passed(body, sees=sees)
    assert (read, start["status"]) == (b"", 400)
    assert said in json.loads(end["body"])["error"]["message"]
