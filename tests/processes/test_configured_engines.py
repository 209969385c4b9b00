"""Engines of the configuration file: programs that know nothing of modelrunner, from readiness to their end."""

import json
import os
import re
import select
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic import TypeAdapter

from modelrunner.backend import Backend, BackendContext
from modelrunner.config.enginetables import AnyEngineTable, EngineTable
from modelrunner.config.locations import ConfigurationError, Locations
from modelrunner.config.settings import Settings
from modelrunner.daemon.engines import configured
from modelrunner.engineapi import EngineApi
from modelrunner.processes.confinement import landlock_abi
from modelrunner.processes.processtree import process_tree
from modelrunner.testing import BackendContract, spec_for
from modelrunner.types import RunSpec
from tests.e2e.daemons import Daemon, environment, until
from tests.fakes import FAKE_ENGINE
from tests.pull.models import gguf
from tests.waiting import HUNG

PYTHON = os.path.realpath(sys.executable)
SERVER = textwrap.dedent("""
    import http.server, json, os, sys

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def say(self, status, body, kind="application/json"):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.say(404, b"{}")

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if "KEY" in os.environ and self.headers["Authorization"] != "Bearer " + os.environ["KEY"]:
                self.say(401, b"{}")
            elif "images" in self.path:
                prompt = json.loads(body)["prompt"]
                self.say(200, b"PNG of " + prompt.encode(), "text/html" if prompt == "a page" else "image/png")
            else:
                heard = {"text": body.partition(b"RIFF")[2][:5].decode(), "model": sys.argv[2], "words": sys.argv[3:]}
                self.say(200, json.dumps(heard).encode())

    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print("whisper is listening", flush=True)
    server.serve_forever()
""")
FORM = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--b\r\n' + (
    b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFFhello\r\n--b--\r\n'
)
MakeDaemon = Callable[[str], Daemon]


@pytest.fixture
def server(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[MakeDaemon]:
    made: list[Daemon] = []

    def start(config: str) -> Daemon:
        (tmp_path / "config.toml").write_text(config)
        variables = environment(tmp_path / "data", tmp_path / "run")
        made.append(one := Daemon(tmp_path / "data", tmp_path / "run" / "modelrunner.sock", variables))
        one.start()
        return one

    yield start
    for one in made:
        one.stop()


def words(*parts: object) -> str:
    return json.dumps([str(part) for part in parts])


def upload(daemon: Daemon, path: str, model: bytes) -> Any:
    with daemon.client() as client:
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        return client.post(path, content=FORM % model, headers=headers)


def test_speech_and_images_are_served_by_programs_that_the_file_names(daemon: MakeDaemon, server: Path) -> None:
    running = daemon(f"""
        [engines.listener]
        command = {words(PYTHON, server, "{port}", "{name}", "{threads}", "{context}")}
        models = [{{ name = "whisper-base", capabilities = ["transcription"], size = "142MB" }}]
        endpoints = {{ "/v1/audio/transcriptions" = "transcription" }}
        ready = {{ line = "is listening", within = "1m" }}
        memory = "200MiB"

        [engines.painter]
        command = {words(PYTHON, server, "{port}", "{name}")}
        models = ["tiny-sd"]
        endpoints = {{ "/v1/images/generations" = "image", "/v1/images/edits" = "opaque" }}
        ready = {{}}
        memory = "100MiB"
    """)
    heard = upload(running, "/v1/audio/transcriptions", b"whisper-base").json()
    assert (heard["text"], heard["model"], int(heard["words"][0]) > 0) == ("hello", "whisper-base", True)
    image = running.post(
        "/v1/images/generations", {"model": "tiny-sd", "prompt": "a cat", "response_format": "b64_json"}
    )
    assert (image.content, image.headers["Content-Type"]) == (b"PNG of a cat", "image/png")
    assert running.post("/v1/images/edits?model=tiny-sd", b'{"prompt": "a dog"}').content == b"PNG of a dog"
    runners = {runner["model_name"]: runner["mode"] for runner in running.runners()}
    assert runners == {"whisper-base": "transcription", "tiny-sd": "image-generation"}
    listed = {model["id"] for model in running.get("/v1/models").json()["data"]}
    assert listed == {"whisper-base", "tiny-sd"}
    assert running.get("/engines/status").json()["listener"] == f"Running: listener at {PYTHON}"


def test_one_process_serves_calls_that_others_have_a_process_for(daemon: MakeDaemon, server: Path) -> None:
    running = daemon(f"""
        [engines.all]
        command = {words(PYTHON, server, "{port}", "{name}")}
        models = ["thing"]
        endpoints = {{ "/v1/audio/transcriptions" = "transcription", "/v1/images/generations" = "image" }}
        modes = ["completion"]
        ready = {{}}
    """)
    assert upload(running, "/v1/audio/transcriptions", b"thing").json()["text"] == "hello"
    image = {"model": "thing", "prompt": "a cat"}
    assert running.post("/engines/all/v1/images/generations", image).content == b"PNG of a cat"
    [runner] = running.runners()
    assert runner["mode"] == "completion"
    assert running.post(f"/runners/{runner['id']}/v1/images/generations", image).content == b"PNG of a cat"
    assert running.post("/v1/audio/speech", {"model": "thing", "input": "hello"}).status_code == 400


def test_a_page_of_html_is_told_with_the_engine_its_log_and_its_table(daemon: MakeDaemon, server: Path) -> None:
    running = daemon(f"""
        [engines.painter]
        command = {words(PYTHON, server, "{port}", "{name}")}
        models = ["tiny-sd"]
        endpoints = {{ "/v1/images/generations" = "image" }}
        ready = {{}}
    """)
    answer = running.post("/v1/images/generations", {"model": "tiny-sd", "prompt": "a page"})
    said = answer.json()["error"]["message"]
    assert (answer.status_code, said.count("\n")) == (502, 0)
    assert said.startswith("the engine painter answered with a page of HTML")
    assert said.endswith("`modelrunner logs tiny-sd` shows its last words (its table: config.toml, line 2)")
    assert "whisper is listening" in running.run("logs", "tiny-sd").stdout


SAVER = """
import http.server, json, os, re, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = re.search(rb'filename="([^"]*)"', body)[1].decode()
        try:
            open(os.path.join(sys.argv[2], name), "xb").write(body)
            said = "kept"
        except OSError as error:
            said = type(error).__name__
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"text": said}).encode())

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.skipif(landlock_abi() < 6, reason="this kernel's Landlock lacks scopes")
def test_an_engine_that_trusts_the_name_of_a_file_writes_nothing_outside_of_its_folder(
    daemon: MakeDaemon, tmp_path: Path
) -> None:
    (tmp_path / "saver.py").write_text(SAVER)
    running = daemon(f"""
        [engines.saver]
        command = {words(PYTHON, tmp_path / "saver.py", "{port}", "{scratch}")}
        models = ["m"]
        endpoints = {{ "/v1/audio/transcriptions" = "transcription" }}
        ready = {{}}
    """)

    def save(name: object) -> str:
        with running.client() as client:
            file = {"file": (str(name), b"sound")}
            said: str = client.post("/v1/audio/transcriptions", data={"model": "m"}, files=file).json()["text"]
            return said

    assert save("stray") == "kept"
    [kept] = tmp_path.rglob("stray")
    assert {save(name) for name in ("../stray", "../../../stray", tmp_path / "stray")} == {"PermissionError"}
    assert [*tmp_path.rglob("stray")] == [kept]
    assert running.run("unload", "--all").returncode == 0
    assert not kept.parent.exists()


@pytest.mark.parametrize("has_key", [True, False])
def test_an_engine_on_tcp_demands_a_key_that_the_daemon_alone_has(
    daemon: MakeDaemon, server: Path, has_key: bool
) -> None:
    running = daemon(f"""
        [engines.painter]
        command = {words(PYTHON, server, "{port}", "{name}")}
        environment = {{ {'KEY = "{key}"' if has_key else ""} }}
        models = ["tiny-sd"]
        endpoints = {{ "/v1/images/generations" = "image" }}
        ready = {{}}
    """)
    body = {"model": "tiny-sd", "prompt": "a cat"}
    assert running.post("/v1/images/generations", body).content == b"PNG of a cat"
    [runner] = running.runners()
    [port] = [each.laddr.port for each in psutil.Process(runner["pid"]).net_connections("tcp") if not each.raddr]
    address = f"http://127.0.0.1:{port}/v1/images/generations"
    asked = [httpx.post(address, json=body, headers=headers) for headers in ({}, {"Authorization": "Bearer x"})]
    assert [answer.status_code for answer in asked] == ([401, 401] if has_key else [200, 200])
    gap = f"requests of other users of this machine: TCP port {port} asks for no key"
    assert (gap in runner["sandbox"]["gaps"]) is not has_key
    command_lines = " ".join(psutil.Process(runner["pid"]).cmdline())
    assert psutil.Process(runner["pid"]).environ().get("KEY", "no key") not in command_lines


def test_models_of_the_store_go_to_a_configured_engine(daemon: MakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf())
    running = daemon(f"""
        [engines.mine]
        command = {words(PYTHON, FAKE_ENGINE, "--host", "{host}", "--port", "{port}", "--model", "{name}")}
        endpoints = {{ "/v1/chat/completions" = "chat" }}
        memory = {{ base = "50MiB", factor = 1.0, token = "1KiB" }}
    """)
    packaged = running.run("package", "--gguf", str(tmp_path / "model.gguf"), "small")
    assert packaged.returncode == 0, packaged.stderr
    answer = running.post("/engines/mine/v1/chat/completions", {"model": "small", "messages": [], "max_tokens": 2})
    assert answer.json()["choices"][0]["message"]["content"] == "w0 w1 "
    refused = running.post("/engines/mine/v1/embeddings", {"model": "small", "input": "a"})
    assert refused.status_code == 400
    assert "mine does not offer embedding" in refused.json()["error"]["message"]


def test_a_model_of_an_engine_has_settings_of_its_own_and_is_loaded_at_the_start(
    daemon: MakeDaemon, server: Path
) -> None:
    running = daemon(f"""
        [engines.listener]
        command = {words(PYTHON, server, "{port}", "{name}")}
        models = ["Whisper:Base"]
        endpoints = {{ "/v1/audio/transcriptions" = "transcription" }}
        ready = {{}}

        [models."Whisper:Base"]
        preload = true
        pin = true
    """)
    with running.client() as client, client.stream("GET", "/engines/events?since=0") as events:
        next(line for line in events.iter_lines() if '"ready"' in line)
    [runner] = running.runners()
    assert (runner["model_name"], runner["pinned"]) == ("Whisper:Base", True)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('command = ["nothing-of-this-name", "{port}"]', "nothing-of-this-name is not a program here"),
        ('command = ["/bin/false", "{port}"]', "the engine odd exited with 1"),
        ('command = ["/bin/sh", "-c", "echo no such model >&2; exit 3 # {port}"]', "no such model"),
        ('command = ["/bin/sleep", "100", "{port}"]\nready = { within = "1s" }', "was not ready after 1 seconds"),
        ('command = ["/bin/sh", "-c", "cat /etc/shadow # {port}"]', "its sandbox may be the reason"),
    ],
)
def test_a_command_that_does_not_serve_is_explained(daemon: MakeDaemon, table: str, said: str) -> None:
    running = daemon(f'\n[engines.odd]\nmodels = ["thing"]\nendpoints = {{ "/v1/odd" = "opaque" }}\n{table}\n')
    answer = running.post("/v1/odd?model=thing", b"")
    assert answer.status_code in (412, 502, 503, 504)
    message = answer.json()["error"]["message"]
    assert said in message
    assert "engine odd" in message or "nothing-of-this-name" in message
    assert "config.toml, line 2)" in message
    assert running.runners() == []


@pytest.mark.parametrize(
    ("port", "said"),
    [("int(sys.argv[1])", "<html>"), ("0", "HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")],
)
def test_an_engine_that_is_no_http_or_listens_elsewhere_is_never_ready(
    daemon: MakeDaemon, tmp_path: Path, port: str, said: str
) -> None:
    program = tmp_path / "echo.py"
    program.write_text(
        "import socketserver, sys\n"
        "class H(socketserver.BaseRequestHandler):\n"
        f"    def handle(self): self.request.recv(99); self.request.send(b'{said}')\n"
        f"with socketserver.ThreadingTCPServer(('127.0.0.1', {port}), H) as server:\n"
        "    print('at port', server.server_address[1], flush=True)\n"
        "    server.serve_forever()\n"
    )
    running = daemon(f"""
        sandbox = "off"  # which would not let it listen elsewhere
        [engines.odd]
        command = {words(PYTHON, program, "{port}")}
        models = ["thing"]
        endpoints = {{ "/v1/odd" = "opaque" }}
        ready = {{ within = "1s" }}
    """)
    message = running.post("/v1/odd?model=thing", b"").json()["error"]["message"]
    assert "was not ready" in message
    assert "engine odd" in message
    assert "at port" in message


def _container(tmp_path: Path) -> tuple[str, Path]:
    """A table whose command starts a process outside of its own session and tree, as `docker run` does, and the file
    with the ID of that process."""
    service = tmp_path / "service.py"
    service.write_text(
        "import os, subprocess, sys\n"
        "while True:\n"
        "    folder, port = open(sys.argv[1]).read().split()\n"
        f"    engine = subprocess.Popen([{PYTHON!r}, {str(FAKE_ENGINE)!r}, '--port', port], start_new_session=True)\n"
        "    open(folder + '/id', 'w').write(str(engine.pid))\n"
        "    open(sys.argv[2], 'a').write(str(engine.pid) + '\\n')\n"
    )
    launcher = tmp_path / "launcher.sh"
    launcher.write_text('echo "$1 $2" > "$3"; exec sleep 1000\n')
    fifo, pids = tmp_path / "fifo", tmp_path / "pids"
    os.mkfifo(fifo)
    table = f"""
        [engines.box]
        command = {words("/bin/sh", launcher, "{scratch}", "{port}", fifo)}
        models = ["boxed"]
        endpoints = {{ "/v1/chat/completions" = "chat" }}
        stop = {{ signal = "INT", grace = "1s", command = ["kill", "-KILL", "{{id}}"] }}
        permissions = {{ writes = [{json.dumps(str(tmp_path))}], processes = "it starts sleep" }}
    """
    return table, pids


@contextmanager
def container_service(tmp_path: Path) -> Iterator[None]:
    command = [PYTHON, str(tmp_path / "service.py"), str(tmp_path / "fifo"), str(tmp_path / "pids")]
    service = subprocess.Popen(command)
    try:
        yield
    finally:
        for process in process_tree(service.pid):
            process.kill()
        service.wait()


def await_end(pid: int) -> None:
    with suppress(ProcessLookupError):
        end = os.pidfd_open(pid)
        select.select([end], [], [], HUNG)
        os.close(end)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_a_command_started_elsewhere_ends_with_its_runner(daemon: MakeDaemon, tmp_path: Path) -> None:
    table, pids = _container(tmp_path)
    with container_service(tmp_path):
        running = daemon(f'sandbox = "off"\n{table}')
        answer = running.post("/v1/chat/completions", {"model": "boxed", "messages": [], "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        first = int(pids.read_text().split()[-1])
        assert is_alive(first)
        running.post("/engines/unload", {"all": True})
        await_end(first)
        assert not list((running.data / "state" / "box").iterdir())

        running.post("/v1/chat/completions", {"model": "boxed", "messages": [], "max_tokens": 1})
        second = int(pids.read_text().split()[-1])
        running.kill()
        assert is_alive(second)
        running.start()
        await_end(second)
        assert not list((running.data / "state" / "box").iterdir())


def test_a_stop_command_that_fails_is_tried_again_at_the_next_start(daemon: MakeDaemon, tmp_path: Path) -> None:
    table, pids = _container(tmp_path)
    allowed = tmp_path / "allowed"
    script = f"if ! test -e {allowed}; then echo no daemon >&2; exit 1; fi; kill -KILL $0"
    table = table.replace('["kill", "-KILL", "{id}"]', words("/bin/sh", "-c", script, "{id}"))
    with container_service(tmp_path):
        running = daemon(f'sandbox = "off"\n{table}')
        running.post("/v1/chat/completions", {"model": "boxed", "messages": [], "max_tokens": 1})
        left = int(pids.read_text().split()[-1])
        running.post("/engines/unload", {"all": True})
        for tries in (1, 2):
            status = running.get("/engines/status").json()["box"]
            assert f"failed, {tries} times now: no daemon; it is tried again at the next start" in status
            assert is_alive(left)
            if tries == 2:
                allowed.touch()
            running.stop()
            running.start()
        await_end(left)
        assert not list((running.data / "state" / "box").iterdir())
        assert "failed" not in running.get("/engines/status").json()["box"]


def test_a_table_takes_effect_at_a_reload(daemon: MakeDaemon, tmp_path: Path) -> None:
    gate, ended = tmp_path / "gate", tmp_path / "ended"
    file, body = tmp_path / "config.toml", {"model": "thing", "messages": [], "max_tokens": 2}

    def table(*options: object) -> str:
        return f"""
            [engines.mine]
            command = {words(PYTHON, FAKE_ENGINE, "--port", "{port}", *options)}
            models = ["thing"]
            endpoints = {{ "/v1/chat/completions" = "chat", "/v1/own/call" = "opaque" }}
            stop = {{ command = ["touch", {json.dumps(str(ended))}] }}
            environment = {{ TOKEN = "a secret" }}
            permissions = {{ reads = [{json.dumps(str(tmp_path))}] }}

            [models.thing]
            backend = "mine"
        """

    def reload(text: str) -> "subprocess.CompletedProcess[str]":
        file.write_text(text)
        return running.run("reload")

    running = daemon("")
    assert running.post("/v1/chat/completions", body).status_code == 404
    said = reload(table("--token-gate", gate)).stdout
    assert ("holds at once" in said, "--token-gate" in said, "a secret" in said) == (True, True, False)
    with running.client() as client:
        request = client.build_request("POST", "/v1/chat/completions", json={**body, "stream": True})
        stream = client.send(request, stream=True)
        lines = stream.iter_lines()
        assert "w0" in next(line for line in lines if "w0" in line)
        [first] = running.runners()
        assert reload(table("--text", "another one")).returncode == 0
        assert not ended.exists()
        gate.touch()
        assert "data: [DONE]" in list(lines)
    answer = running.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "another one"
    assert ended.exists()
    [second] = running.runners()
    assert first["id"] != second["id"]

    wrong = reload(table("--text", "x").replace("{port}", "{prot}"))
    assert (wrong.returncode, "there is no place {prot}" in wrong.stderr) == (1, True), wrong.stderr
    taken = reload('[engines."llama.cpp"]\nurl = "http://localhost"')
    assert "a backend has this name" in taken.stderr
    assert running.post("/v1/chat/completions", body).status_code == 200
    assert reload("").returncode == 0
    assert running.post("/v1/chat/completions", body).status_code == 404
    assert "mine" not in running.get("/engines/status").json()


def test_settings_of_an_engines_model_take_effect_at_a_reload(daemon: MakeDaemon, tmp_path: Path) -> None:
    table = f"""
        [engines.mine]
        command = {words(PYTHON, FAKE_ENGINE, "--port", "{port}")}
        models = ["thing"]
        endpoints = {{ "/v1/chat/completions" = "chat" }}
    """
    running, body = daemon(table), {"model": "thing", "messages": [], "max_tokens": 9}
    running.post("/v1/chat/completions", body)
    (tmp_path / "config.toml").write_text(f"{table}\n[models.thing]\nmax-tokens = 2\nparallel = 3\n")
    told = running.run("reload").stdout
    assert "thing" in told
    assert "its runner ends after its last request" in told
    answer = running.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "w0 w1 "
    until(lambda: [r for r in running.runners() if r["parallel"] == 3])


def _leftovers(context: BackendContext, *commands: list[str]) -> type[Backend]:
    """The class of an engine whose earlier runs have left these commands."""
    assert context.state is not None
    context.state.mkdir(exist_ok=True)
    for number, command in enumerate(commands):
        (context.state / f"{number}.stop").write_text(json.dumps({"command": command}))
    table = {"command": ["sleep", "{port}"], "stop": {"command": ["true"]}}
    return configured("mine", EngineTable.model_validate(table))


@pytest.fixture
def context(tmp_path: Path) -> BackendContext:
    return BackendContext(tmp_path, tmp_path, tmp_path, {}, tmp_path / "state")


def test_a_stop_command_that_never_succeeds_is_given_up(context: BackendContext) -> None:
    kind = _leftovers(context, ["false"])
    for _ in range(5):
        assert [each.name for each in (context.state or Path()).iterdir()] == ["0.stop"]
        backend = kind(context)
    assert "5 times now" in backend.status().fault
    assert "end it yourself" in backend.status().fault
    assert not list((context.state or Path()).iterdir())


def test_leftovers_are_stopped_at_once(context: BackendContext, tmp_path: Path) -> None:
    """Each command ends only when all have begun."""
    begun = tmp_path / "begun"
    begun.mkdir()
    wait = f"touch {begun}/$0; while [ $(ls {begun} | wc -l) -lt 4 ]; do sleep 0.01; done"
    backend = _leftovers(context, *[["/bin/sh", "-c", wait, str(number)] for number in range(4)])(context)
    assert backend.status().fault == ""
    assert not list((context.state or Path()).iterdir())


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('command = ["x", "{prot}"]', "there is no place {prot}; did you mean 'port'?"),
        ('command = ["x"]', "either {port} or {socket}"),
        ('command = ["x", "{port}", "{socket}"]', "either {port} or {socket}"),
        ("command = []", "command: it is empty"),
        ('command = "x {port}"', "command: write a list"),
        ('command = ["x", "{port}"]\nenvironment = { A = "{prot}" }', "there is no place {prot}"),
        ('command = ["x", "{port}"]\nmodel-name = "{port}"', "there is no place {port}; places are name, model"),
        ('command = ["x", "{port}"]\nstop = { signal = "TREM" }', "there is no signal 'TREM'"),
        ('command = ["x", "{port}"]\nmemory = { base = "lots" }', "'lots' is not a size"),
        ('command = ["x", "{port}"]\nendpoints = { "v1/x" = "chat" }', "is no path of an engine"),
        ('command = ["x", "{port}"]\nendpoints = { "/v1/x" = "chats" }', "endpoints"),
        ('command = ["x", "{port}", "{device}"]', "set memory.device"),
        ('command = ["x", "{port}", "--api-key", "{key}"]', "{key} stands in `environment` alone"),
        ('command = ["x", "{socket}"]\nenvironment = { KEY = "{key}" }', "nobody else can reach {socket}"),
        ('command = ["x", "{port}"]\nreddy = {}', "unknown setting 'reddy'; did you mean 'ready'?"),
        ('command = ["x", "{port}"]\nworking-directory = "here"', "is not absolute"),
        ('command = ["x", "{port}"]\nmodels = ["a"]\nformats = ["gguf"]', "either formats"),
        ('command = ["x", "{port}"]\nmodes = ["A b"]', "'A b' is no name"),
        ('[engines."A b"]\nurl = "http://here"', "engines.A b: 'A b' is no name: write 1 to 32 of"),
        ('url = "http://here"\nkey-env = "sk-1"', "write the name of a variable"),
    ],
)
def test_a_wrong_table_names_its_line(tmp_path: Path, table: str, said: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"\n{'' if table.startswith('[') else '[engines.mine]'}\n{table}\n")
    with pytest.raises(ConfigurationError) as wrong:
        Settings.load(Locations.find({"MODELRUNNER_CONFIG": str(file), "MODELRUNNER_DATA_DIR": str(tmp_path)}))
    assert said.lower() in wrong.value.message.lower()
    assert f"{file}, line " in wrong.value.message
    assert "sk-1" not in wrong.value.message


PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
ROWS = re.findall(r"^\| [^|]+ \| (`(?:command|url) = .*`) \| (?:not )?run", PAGE, re.MULTILINE)
BLOCKS = re.findall(r"^```toml\n\[engines\.\w+\]\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("table", [*["\n".join(re.findall(r"`([^`]+)`", row)) for row in ROWS], *BLOCKS])
def test_each_table_of_the_documentation_is_right(table: str) -> None:
    read = TypeAdapter[AnyEngineTable](AnyEngineTable).validate_python(tomllib.loads(table))
    assert configured("mine", read).modes
    assert len(ROWS) >= 15


def test_an_engine_that_knows_its_model_by_one_name_alone_is_asked_by_it(daemon: MakeDaemon, tmp_path: Path) -> None:
    record = tmp_path / "record"
    running = daemon(f"""
        [engines.mine]
        command = {words(PYTHON, FAKE_ENGINE, "--port", "{port}", "--record", record)}
        models = ["thing"]
        model-name = "the-only:{{name}}"
        endpoints = {{ "/v1/chat/completions" = "chat" }}
        permissions = {{ writes = [{json.dumps(str(tmp_path))}] }}
    """)
    assert running.post("/v1/chat/completions", {"model": "thing", "messages": [], "max_tokens": 1}).status_code == 200
    assert "the-only:thing" in record.read_text()


def test_a_name_that_a_backend_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[engines."llama.cpp"]\ncommand = ["x", "{port}"]\n')
    variables = environment(tmp_path / "data", tmp_path / "run")
    serving = subprocess.run(
        [sys.executable, "-m", "modelrunner", "serve"], env=variables, capture_output=True, text=True, check=False
    )
    assert serving.returncode == 1
    assert "[engines.llama.cpp]: a backend has this name" in serving.stderr


class TestConfigured(BackendContract):
    """The suite that every backend passes."""

    @pytest.fixture
    def spec(self, tmp_path: Path) -> RunSpec:
        path = tmp_path / "small.gguf"
        path.write_bytes(gguf())
        return spec_for(path, tmp_path)

    @pytest.fixture
    def backend(self, context: BackendContext) -> Backend:
        command = [PYTHON, str(FAKE_ENGINE), "--port", "{port}", "--model", "{name}"]
        return configured("mine", EngineTable.model_validate({"command": command}))(context)

    async def test_its_interface_is_that_of_a_backend_with_code(self, backend: Backend, spec: RunSpec) -> None:
        """So the daemon treats its faults as it treats those of any other."""
        assert replace(backend.api(spec), metrics="/metrics") == EngineApi.openai(spec.mode, spec.bundle.name)

    @pytest.mark.parametrize(
        ("table", "path"),
        [
            ({"endpoints": {"/chat": "chat", "/v1/own": "opaque"}}, "/chat"),
            ({"endpoints": {"/v1/own": "opaque"}}, None),
            ({"stop": {"command": ["true"]}}, None),
        ],
    )
    async def test_a_token_is_asked_of_one_that_seems_to_hang(
        self, context: BackendContext, spec: RunSpec, table: dict[str, Any], path: str | None
    ) -> None:
        """Where it has an endpoint for that, and its work can be seen."""
        made = configured("mine", EngineTable.model_validate({"command": [PYTHON, "{port}"], **table}))(context)
        probe = made.api(spec).probe
        assert (probe and probe.path) == path
