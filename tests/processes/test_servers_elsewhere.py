"""Engines that are servers elsewhere: a second daemon with TLS and a key, and servers that fail."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelrunner.config.locations import ConfigurationError, Locations
from modelrunner.config.settings import Settings
from modelrunner.daemon.certificates import self_signed
from modelrunner.web.session import refused_address
from tests.e2e.daemons import Daemon, environment, until
from tests.fakes import FAKE_ENGINE
from tests.ports import reserved_port
from tests.processes.test_configured_engines import PYTHON, words

FAKE = f"""
[engines.fake]
command = {words(PYTHON, FAKE_ENGINE, "--port", "{port}")}
models = [{{ name = "tiny", capabilities = ["completion", "chat"], context-size = 4096 }}, "vectors"]
endpoints = {{ "/v1/chat/completions" = "chat", "/v1/completions" = "completion", "/v1/embeddings" = "embeddings" }}
"""
BIG = f"""
[engines.local]
command = {words(PYTHON, FAKE_ENGINE, "--port", "{port}")}
models = ["big"]
endpoints = {{ "/v1/chat/completions" = "chat" }}
memory = "1000000GiB"
"""
QUESTION = [{"role": "user", "content": "hello"}]
SECRET = "sk-of-this-test-0123456789"
Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    made: list[Daemon] = []

    def start(name: str, config: str, **variables: str) -> Daemon:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.toml").write_text(config)
        given = environment(folder / "data", folder / "run") | variables
        made.append(one := Daemon(folder / "data", folder / "run" / "modelrunner.sock", given))
        one.start()
        return one

    yield start
    for one in made:
        one.stop()


@pytest.fixture
def far(start: Callable[..., Daemon]) -> Iterator[tuple[Daemon, int, str]]:
    """A daemon with TLS and a key: itself, its port and the key."""
    with reserved_port() as port:
        daemon = start("far", f'tls = "self-signed"\n{FAKE}', MODELRUNNER_LISTEN=f"127.0.0.1:{port}")
        made = daemon.post("/keys", {"name": "friend", "scopes": ["inference", "models"]})
        yield daemon, port, made.json()["text"]


def table(port: int, certificate: Path, more: str = "") -> str:
    return f'[engines.far]\nurl = "https://127.0.0.1:{port}"\nkey-env = "FAR_KEY"\nca = "{certificate}"\n{more}'


def message(answer: Any) -> str:
    return str(answer.json()["error"]["message"])


def chat(daemon: Daemon, model: str = "far/tiny", **fields: Any) -> Any:
    return daemon.post("/v1/chat/completions", {"model": model, "messages": QUESTION, "max_tokens": 3, **fields})


def test_the_models_of_another_daemon_are_listed_and_asked(
    start: Callable[..., Daemon], far: tuple[Daemon, int, str], tmp_path: Path
) -> None:
    there, port, key = far
    near = start("near", table(port, there.data / "tls" / "certificate.pem"), FAR_KEY=key)

    listed = until(lambda: {model["id"]: model for model in near.get("/v1/models").json()["data"]})
    assert sorted(listed) == ["far/tiny", "far/vectors"]
    assert (listed["far/tiny"]["context_window"], listed["far/tiny"]["backend"]) == (4096, "far")
    assert {model["name"] for model in near.get("/api/tags").json()["models"]} == {f"{name}:latest" for name in listed}
    shown = near.run("ls")
    assert shown.returncode == 0, shown.stderr
    assert "far/tiny" in shown.stdout

    answer = chat(near)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "w0 w1 w2 "
    stream = chat(near, stream=True)
    assert stream.text.rstrip().endswith("data: [DONE]")
    vectors = near.post("/v1/embeddings", {"model": "far/vectors", "input": ["a", "b"]})
    assert len(vectors.json()["data"]) == 2, vectors.text
    by_engine = near.post("/engines/far/v1/chat/completions", {"model": "tiny", "messages": QUESTION, "max_tokens": 1})
    assert by_engine.status_code == 200, by_engine.text
    ollama = near.post("/api/chat", {"model": "far/tiny:latest", "messages": QUESTION, "stream": False})
    assert ollama.json()["message"]["content"].startswith("w0 "), ollama.text
    claude = near.post("/v1/messages", {"model": "far/tiny", "messages": QUESTION, "max_tokens": 2})
    assert claude.json()["content"][0]["text"] == "w0 w1 ", claude.text

    running = {(one["model_name"], one["mode"]): one for one in near.runners()}
    assert set(running) == {("far/tiny", "completion"), ("far/vectors", "embedding")}
    runner = running["far/tiny", "completion"]
    assert (runner["pid"], runner["memory"]["estimated"]["ram"]) == (None, 0)
    assert runner["endpoint"] == f"https://127.0.0.1:{port}"
    assert near.descendants() == []
    assert near.get(f"/logs?runner={runner['id']}").text == ""
    assert near.post("/engines/unload", {"models": ["far/tiny"]}).json()["unloaded"] == ["far/tiny"]
    assert f"https://127.0.0.1:{port}, 2 models" in near.get("/engines/status").json()["far"]
    assert key not in (tmp_path / "near" / "serve.log").read_text()


def test_the_fall_back_answers_where_nothing_fits_and_says_so(
    start: Callable[..., Daemon], far: tuple[Daemon, int, str]
) -> None:
    there, port, key = far
    certificate = there.data / "tls" / "certificate.pem"
    more = f'{BIG}\n[models.big]\nfallback = "far/tiny"\n'
    near = start("near", table(port, certificate, more), FAR_KEY=key)
    for stream in (False, True):
        answer = chat(near, "big", stream=stream)
        assert (answer.status_code, answer.headers["X-Modelrunner-Model"]) == (200, "far/tiny"), answer.text
    chosen = near.post("/engines/local/v1/chat/completions", {"model": "big", "messages": QUESTION})
    assert chosen.status_code == 507

    (near.data.parent / "config.toml").write_text(table(port, certificate, BIG))
    assert near.run("reload").returncode == 0
    refused = chat(near, "big")
    assert (refused.status_code, "X-Modelrunner-Model" in refused.headers) == (507, False)


def test_its_models_are_limited_counted_and_recorded_as_any_other(
    start: Callable[..., Daemon], far: tuple[Daemon, int, str]
) -> None:
    there, port, key = far
    settings = '[models."far/tiny"]\nmax-tokens = 2\nrecording = true\nparameters.set = { seed = 7 }\n'
    config = f"telemetry = true\n{table(port, there.data / 'tls' / 'certificate.pem', settings)}"
    near = start("near", config, FAR_KEY=key)
    answer = chat(near, max_tokens=9)
    assert answer.json()["choices"][0]["message"]["content"] == "w0 w1 ", answer.text
    [ended] = until(lambda: near.get("/engines/requests?status=200").json())
    assert (ended["model_name"], ended["backend"], ended["completion_tokens"]) == ("far/tiny", "far", 2)
    recorded = near.get(f"/engines/requests/{answer.headers['X-Request-ID']}").json()
    assert "hello" in recorded["body"]["text"]
    assert key not in json.dumps(recorded)
    [used] = [row for row in near.get("/usage?by=model").json() if row["requests"]]
    assert used["completion_tokens"] == 2
    assert "stopped" in near.get("/engines/why?model=far/vectors").text


def test_a_key_that_may_not_use_the_fall_back_gets_none(
    start: Callable[..., Daemon], far: tuple[Daemon, int, str]
) -> None:
    there, port, key = far
    more = f'{BIG}\n[models.big]\nfallback = "far/tiny"\n'
    near = start("near", table(port, there.data / "tls" / "certificate.pem", more), FAR_KEY=key)
    text = near.post("/keys", {"name": "narrow", "models": ["big"], "scopes": ["inference"]}).json()["text"]
    with near.client() as client:
        body = {"model": "big", "messages": QUESTION}
        answer = client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {text}"})
    assert (answer.status_code, "far" in message(answer)) == (507, False), answer.text


class Faulty:
    """A server over TLS whose answers a test sets."""

    def __init__(self, folder: Path) -> None:
        self.answer: Answer = (200, {}, b"{}")
        self.cut = False
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        faulty = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.say(200, {"Content-Type": "application/json"}, b'{"data": [{"id": "m"}, 7, {"id": ""}, {}]}')

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                faulty.seen.append((self.path, body.decode(), dict(self.headers)))
                self.say(*faulty.answer)

            def say(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if cut := faulty.cut and self.command == "POST":
                    self.send_header("Transfer-Encoding", "chunked")
                else:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(body), body) if cut else body)
                self.close_connection = cut

            def log_message(self, *_: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        certificate = self_signed(folder, [])
        self.server.socket = certificate.context.wrap_socket(self.server.socket, server_side=True)
        self.certificate, self.port = folder / "certificate.pem", self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Faulty]:
    made = Faulty(tmp_path / "tls")
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ((401, {}, b'{"error": {"message": "Incorrect key: %b"}}'), 502, "far refuses the key in FAR_KEY (status 401)"),
        ((404, {}, b'{"error": {"message": "no such model"}}'), 404, "far: no such model"),
        ((429, {"Retry-After": "17"}, b'{"error": {"message": "slow down"}}'), 429, "far takes no more requests now"),
        ((402, {}, b'{"error": {"message": "no money left"}}'), 502, "far failed with status 402: no money left"),
        ((400, {}, b'{"error": {"message": "bad %b"}}'), 400, "far: bad ..."),
        ((500, {}, b'{"error": {"message": "oh, %b"}}'), 502, "far failed with status 500: oh, ..."),
        ((502, {"Content-Type": "text/html"}, b"<html>Bad gateway</html>"), 502, "far failed with status 502"),
        ((503, {"Retry-After": "9"}, b"<html>"), 503, "far failed with status 503"),
        ((200, {"Content-Type": "text/html"}, b"<html>Welcome</html>"), 502, "engine far answered with a page of HTML"),
        ((302, {"Location": "https://127.0.0.1/"}, b""), 502, "status 302"),
        ((200, {}, b""), 502, "empty"),
    ],
)
def test_what_a_server_answers_wrongly_is_a_sentence(
    start: Callable[..., Daemon], faulty: Faulty, tmp_path: Path, answer: Answer, status: int, said: str
) -> None:
    near = start("near", table(faulty.port, faulty.certificate), FAR_KEY=SECRET)
    faulty.answer = (answer[0], answer[1], answer[2].replace(b"%b", SECRET.encode()))
    found = chat(near, "far/m")
    assert (found.status_code, said in message(found)) == (status, True), found.text
    assert ("(its table: config.toml, line 1)" in message(found)) == (status == 502 and answer[0] == 200)
    assert found.headers.get("Retry-After") == answer[1].get("Retry-After")
    claude = near.post("/v1/messages", {"model": "far/m", "messages": QUESTION, "max_tokens": 2})
    assert claude.status_code == status
    assert claude.json()["type"] == "error"
    [path, body, headers] = faulty.seen[0]
    assert (path, json.loads(body)["model"]) == ("/v1/chat/completions", "m")
    assert (headers["Authorization"], headers["Host"]) == (f"Bearer {SECRET}", f"127.0.0.1:{faulty.port}")
    assert SECRET not in found.text + claude.text + (tmp_path / "near" / "serve.log").read_text()


def test_an_answer_that_is_cut_in_the_middle_is_told(start: Callable[..., Daemon], faulty: Faulty) -> None:
    near = start("near", table(faulty.port, faulty.certificate), FAR_KEY=SECRET)
    faulty.cut = True
    faulty.answer = (200, {"Content-Type": "text/event-stream"}, b'data: {"choices": []}\n\n')
    with near.client() as client:
        body = {"model": "far/m", "messages": QUESTION, "stream": True}
        heard = client.post("/v1/chat/completions", json=body).text
    assert heard.startswith('data: {"choices": []}\n\nevent: error\n'), heard
    assert "closed the connection in the middle of its answer" in heard
    faulty.answer = (200, {"Content-Type": "application/json"}, b'{"choices": [')
    with near.client() as client, pytest.raises(httpx.RemoteProtocolError):
        client.post("/v1/chat/completions", json={"model": "far/m", "messages": QUESTION})


def test_a_server_with_another_path_and_one_that_is_not_there(
    start: Callable[..., Daemon], faulty: Faulty, tmp_path: Path
) -> None:
    with reserved_port() as port:
        near = start(
            "near",
            f'[engines.gone]\nurl = "http://127.0.0.1:{port}"\n'
            f'[engines.far]\nurl = "https://127.0.0.1:{faulty.port}/api/v9/"\nca = "{faulty.certificate}"\n'
            f'[engines.stranger]\nurl = "https://127.0.0.1:{faulty.port}"\n'
            '[engines.silent]\nurl = "https://127.0.0.1:1"\nkey-env = "NO_SUCH_KEY"\n',
        )
        gone = chat(near, "gone/any")
        assert gone.status_code == 502
        assert f"http://127.0.0.1:{port} cannot be reached: " in message(gone)
    stranger = chat(near, "stranger/any")
    assert stranger.status_code == 502
    assert "its certificate is not trusted" in message(stranger)
    assert "NO_SUCH_KEY" in message(chat(near, "silent/any"))
    listed = until(lambda: [model["id"] for model in near.get("/v1/models").json()["data"]])
    assert listed == ["far/m"]
    chat(near, "far/m")
    assert faulty.seen[0][0] == "/api/v9/chat/completions"
    assert "Authorization" not in faulty.seen[0][2]
    status = near.get("/engines/status").json()
    assert "cannot be reached" in status["gone"]
    assert status["silent"].startswith("Error: the variable NO_SUCH_KEY")


@pytest.mark.parametrize(
    ("address", "tls", "said"),
    [
        ("169.254.169.254", True, "no address of a server"),
        ("::ffff:169.254.169.254", True, "no address of a server"),
        ("fe80::1%eth0", False, "no address of a server"),
        ("0.0.0.0", False, "no address of a server"),
        ("8.8.8.8", False, "without TLS"),
        ("8.8.8.8", True, ""),
        ("10.1.2.3", False, ""),
        ("127.0.0.1", False, ""),
        ("::1", True, ""),
    ],
)
def test_addresses_that_no_server_has_get_nothing(address: str, tls: bool, said: str) -> None:
    found = refused_address("https://far.example", address, tls=tls)
    assert said in found
    assert bool(said) == bool(found)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('url = "ftp://x"', "is not the address of a server"),
        ('url = "https://"', "is not the address of a server"),
        ('url = "https://me:secret@x"', "the key is in the variable of `key-env`"),
        ('url = "https://x/v1?key=a"', "only a host, a port and a path"),
        ('url = "https://x:99999"', "out of range"),
        ('url = "https://x"\nkey-env = "sk-12 3"', "key-env"),
        ('url = "https://x"\nkey-en = "sk-123"', "unknown setting 'key-en'; did you mean 'key-env'?"),
        ('url = "https://x"\napi = "grpc"', "api"),
        (
            'url = "https://x"\ncommand = ["y", "{port}"]',
            "'command' is for an engine that is a command, and `url` names",
        ),
        ('url = "https://x"\nmodels = ["y"]', "'models' is for an engine that is a command"),
        ('command = ["y", "{port}"]\nkey-env = "KEY"', "'key-env' is for a server elsewhere, which `url` names"),
    ],
)
def test_a_wrong_table_names_its_line(tmp_path: Path, config: str, said: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"\n[engines.far]\n{config}\n")
    with pytest.raises(ConfigurationError) as wrong:
        Settings.load(Locations.find({"MODELRUNNER_CONFIG": str(file), "MODELRUNNER_DATA_DIR": str(tmp_path)}))
    assert said in wrong.value.message
    assert f"{file}, line " in wrong.value.message
    assert "[url]" not in wrong.value.message
