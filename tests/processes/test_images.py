"""Images by an engine of the configuration file: a program that draws in steps, and knows nothing of modelrunner."""

import base64
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.daemons import Daemon, environment, until
from tests.processes.test_configured_engines import words
from tests.waiting import HUNG

PYTHON = os.path.realpath(sys.executable)
# With `slow` as its prompt it waits in each step until it is let go on, by a file of the step's name.
DRAWER = textwrap.dedent("""
    import base64, http.server, json, os, select, sys, time

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def say(self, status, value):
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def left(self):
            return select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, 2)

        def event(self, kind, **fields):
            data = f"data: {json.dumps({'type': 'image_generation.' + kind, **fields})}\\n\\n".encode()
            self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(data), data))

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            width, height = map(int, asked.get("size", "8x8").split("x"))
            if width * height > 512 * 512:
                fault = {"message": "512x512 is the largest size", "param": "size", "type": "invalid_request_error"}
                return self.say(400, {"error": fault})
            stream = asked.get("stream")
            if stream:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
            for step in range(4):
                if stream:
                    self.event("partial_image", partial_image_index=step, b64_json="AA==")
                while asked["prompt"] == "slow" and not os.path.exists(os.path.join(sys.argv[2], str(step))):
                    if self.left():
                        print("cancelled in step", step, flush=True)
                        self.close_connection = True
                        return
                    time.sleep(0.005)
            drawn = base64.b64encode(f"{asked.get('seed')} {asked['prompt']}".encode()).decode()
            if stream:
                self.event("completed", b64_json=drawn)
                self.wfile.write(b"0\\r\\n\\r\\n")
            else:
                self.say(200, {"created": 1, "data": [{"b64_json": drawn}] * asked.get("n", 1)})

    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
""")
IMAGES = "/v1/images/generations"


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    (tmp_path / "gates").mkdir()
    return tmp_path / "gates"


@pytest.fixture
def daemon(request: pytest.FixtureRequest, tmp_path: Path, gates: Path) -> Iterator[Daemon]:
    """With an engine that makes streams, or none for the parameter "whole", or of long pictures for "long"."""
    changes = {"": ("", ""), "whole": ('asked.get("stream")', "False"), "long": ('"AA=="', '"A" * 3_000_000')}
    (tmp_path / "drawer.py").write_text(DRAWER.replace(*changes[getattr(request, "param", "")]))
    (tmp_path / "config.toml").write_text(f"""
        telemetry = true
        [engines.drawer]
        command = {words(PYTHON, tmp_path / "drawer.py", "{port}", gates)}
        models = [{{ name = "tiny-sd", capabilities = ["image-generation"] }}]
        endpoints = {{ "{IMAGES}" = "image" }}
        ready = {{}}
    """)
    started = Daemon(
        tmp_path / "data", tmp_path / "run" / "modelrunner.sock", environment(tmp_path / "data", tmp_path / "run")
    )
    started.start(listen="127.0.0.1:0")
    yield started
    started.stop()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    base = daemon.get("/version").json()["listen"]
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=HUNG) as made:
        yield made


def test_openais_client_gets_pictures(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[bytes]:
        answer = client.images.generate(
            model="tiny-sd", prompt="a cat", n=2, response_format="b64_json", extra_body={"seed": seed}
        )
        return [base64.b64decode(picture.b64_json or "") for picture in answer.data or []]

    assert draw(7) == [b"7 a cat"] * 2
    assert draw(7) == draw(7) != draw(8)


def test_progress_comes_step_by_step(client: openai.OpenAI, gates: Path) -> None:
    """The engine begins a step only once the client has seen the one before."""
    kinds = []
    with client.images.generate(model="tiny-sd", prompt="slow", stream=True, partial_images=3) as stream:
        for event in stream:
            kinds.append(event.type)
            (gates / str(len(kinds) - 1)).touch()
    assert kinds == ["image_generation.partial_image"] * 4 + ["image_generation.completed"]


@pytest.mark.parametrize("daemon", ["long"], indirect=True)
def test_a_stream_goes_on_in_the_middle_of_a_picture(daemon: Daemon, gates: Path) -> None:
    """A client that was cut off there has nothing of the picture, and asks for it from its beginning."""
    url = f"{daemon.get('/version').json()['listen']}{IMAGES}"
    body = {"model": "tiny-sd", "prompt": "slow", "stream": True, "partial_images": 3}
    headers = {"X-Resumable": "true", "X-Request-ID": "r1"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=HUNG) as answer:
        taken = 0
        for piece in answer.iter_raw():
            taken += len(piece)
            if taken > 2_500_000:
                break
    for step in range(4):
        (gates / str(step)).touch()
    rest = daemon.get("/v1/streams/r1?from=0").text
    assert (rest.count("partial_image_index"), rest.count("completed")) == (4, 1)


@pytest.mark.parametrize("daemon", ["whole"], indirect=True)
def test_a_stream_of_an_engine_that_makes_none(client: openai.OpenAI) -> None:
    """The first request loads the engine, the second finds it."""
    for _ in range(2):
        with client.images.generate(model="tiny-sd", prompt="a cat", n=2, stream=True) as stream:
            drawn = [(event.type, event.b64_json) for event in stream]
        assert drawn == [("image_generation.completed", base64.b64encode(b"None a cat").decode())] * 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine_within_a_step(daemon: Daemon, gates: Path, stream: bool) -> None:
    (gates / "0").touch()
    with daemon.client() as client:
        if stream:
            body = {"model": "tiny-sd", "prompt": "slow", "stream": True}
            with client.stream("POST", IMAGES, json=body) as answer:
                next(answer.iter_raw())
        else:
            client.timeout = 1
            with pytest.raises(Exception, match="timed out"):
                client.post(IMAGES, json={"model": "tiny-sd", "prompt": "slow"})
    until(lambda: "cancelled in step 1" in daemon.get("/logs?model=tiny-sd").text)
    until(lambda: not any(runner["in_use"] for runner in daemon.runners()))


def test_a_size_that_is_too_large_is_the_engines_error(daemon: Daemon) -> None:
    answer = daemon.post(IMAGES, {"model": "tiny-sd", "prompt": "a cat", "size": "1000000000x1000000000"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "512x512 is the largest size")


def test_what_does_not_draw_is_refused(daemon: Daemon) -> None:
    answer = daemon.post("/v1/chat/completions", {"model": "tiny-sd", "messages": [{"role": "user", "content": "a"}]})
    assert answer.status_code == 400
    assert "drawer does not offer completion" in answer.json()["error"]["message"]
    answer = daemon.post("/v1/images/edits?model=tiny-sd", b"")
    assert (answer.status_code, "drawer does not serve" in answer.json()["error"]["message"]) == (501, True)


def test_the_command_line(daemon: Daemon, tmp_path: Path) -> None:
    done = daemon.run("run", "tiny-sd", "a cat", "-o", str(tmp_path / "cat.png"), "--seed", "3")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "cat.png").read_bytes() == b"3 a cat"
    done = daemon.run("configure", "tiny-sd", "--keep-alive", "1h")
    assert done.returncode == 0, done.stderr
    assert json.loads(daemon.run("configure", "tiny-sd", "--json").stdout)
