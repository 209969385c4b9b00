"""What `scripts/bench proxy` compares: an engine reached directly, nginx before it, daemons, and other proxies."""

import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
CHAT = "/v1/chat/completions"
ANYBODY = ssl._create_unverified_context()  # a certificate is not what is measured
NGINX = """
{user} worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.err; worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{ access_log off; keepalive_requests 1000000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/temp;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engine {{ server unix:{folder}/engine.sock; keepalive 512; }}
  server {{ listen 127.0.0.1:{port}; location / {{
    proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
  {tls} }}
"""
NGINX_TLS = """server {{ listen 127.0.0.1:{port} ssl; ssl_certificate {certificate}/certificate.pem;
  ssl_certificate_key {certificate}/key.pem; ssl_protocols TLSv1.2 TLSv1.3; location / {{
    proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
"""


@dataclass(frozen=True)
class Subject:
    """Something on a port, and the process whose CPU time is its own (none: not measured). `key` is what its clients
    send, "" for none."""

    name: str
    port: int
    process: psutil.Process | None = None
    key: str = ""
    scheme: str = "http"

    @property
    def base(self) -> str:
        """The name of the subject that it is compared with."""
        return "nginx, TLS" if self.scheme == "https" else "nginx"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def running(*argv: object, **options: object) -> Iterator[psutil.Process]:
    process = subprocess.Popen([str(a) for a in argv], **options)  # type: ignore[call-overload]
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def wait_for(port: int, seconds: int = 10, key: Path | None = None, scheme: str = "http") -> None:
    """Until a chat on the port is answered: the model is loaded by then. `key` is the file of the key to send."""
    data = json.dumps({"model": "bench", "messages": []}).encode()
    for _ in range(seconds * 20):
        try:
            headers = {"Content-Type": "application/json"} | ({} if key is None else {"X-API-Key": key.read_text()})
            ask = urllib.request.Request(f"{scheme}://127.0.0.1:{port}{CHAT}", data, headers)
            with urllib.request.urlopen(ask, timeout=20, context=ANYBODY if scheme == "https" else None) as answer:
                answer.read()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"nothing answers on port {port}")


@contextmanager
def litellm(folder: Path, program: str, engine: int) -> Iterator[Subject]:
    """Its proxy with no keys, no database and no log."""
    port, file = free_port(), folder / "litellm.json"
    parameters = {"model": "openai/bench", "api_base": f"http://127.0.0.1:{engine}/v1", "api_key": "none"}
    file.write_text(json.dumps({"model_list": [{"model_name": "bench", "litellm_params": parameters}]}))
    variables = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    variables["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    options = ("--config", file, "--host", "127.0.0.1", "--port", port, "--num_workers", 1, "--telemetry", "False")
    with (
        open(folder / "litellm.log", "w") as log,
        running(program, *options, env=os.environ | variables, stdout=log, stderr=log) as process,
    ):
        wait_for(port, 60)
        yield Subject("litellm", port, process)


@contextmanager
def modelrunner(
    name: str, place: Path, engine: Path, *, checkout: Path | None = None, kind: str = "", scheme: str = "http"
) -> Iterator[Subject]:
    """A daemon with its files in `place`, of another `checkout` if one is given. `kind` is a variable that daemon.py
    reads, "" for none."""
    port = free_port()
    place.mkdir(exist_ok=True)
    command: tuple[object, ...] = (sys.executable, HERE / "daemon.py")
    own = os.environ | ({kind: "true"} if kind else {})
    if checkout is not None:
        command = checkout / ".venv/bin/python", checkout / "scripts/proxybench/daemon.py"
        own |= {"PYTHONPATH": str(checkout)}
    with running(*command, place, engine, port, env=own) as process:
        key = place / "key" if kind == "OBSERVED" else None
        wait_for(port, key=key, scheme=scheme)
        yield Subject(name, port, process, key.read_text() if key else "", scheme)


@contextmanager
def started(
    also: list[str], litellm_program: str | None, before: Path | None, *, observed: bool, tls: bool
) -> Iterator[tuple[Path, list[Subject]]]:
    """Starts all of them, and yields their folder, with the programs `engine` and `listen`, and them; they end with the
    block. nginx's TLS has the certificate of ours."""
    with (
        tempfile.TemporaryDirectory() as name,
        _started(Path(name), also, litellm_program, before, observed=observed, tls=tls) as found,
    ):
        yield Path(name), found


@contextmanager
def _started(
    folder: Path, also: list[str], litellm_program: str | None, before: Path | None, *, observed: bool, tls: bool
) -> Iterator[list[Subject]]:
    engine, block = folder / "engine", ""
    for program in ("engine", "listen"):
        subprocess.run(["gcc", "-O2", "-o", folder / program, HERE / f"{program}.c", "-lpthread"], check=True)
    direct, nginx, over_tls = free_port(), free_port(), free_port()
    user = "user root;" if os.geteuid() == 0 else ""
    others = [Subject(name, int(port)) for name, port in (text.split("=") for text in also)]
    with ExitStack() as stack:
        stack.enter_context(running(engine, folder / "engine.sock", direct))
        if tls:
            secure = modelrunner("modelrunner, TLS", folder / "tls", engine, kind="TLS", scheme="https")
            others.append(stack.enter_context(secure))
            [certificate] = (folder / "tls").rglob("certificate.pem")
            block = NGINX_TLS.format(port=over_tls, certificate=certificate.parent)
        (folder / "nginx.conf").write_text(NGINX.format(user=user, folder=folder, port=nginx, tls=block))
        master = stack.enter_context(running("nginx", "-c", folder / "nginx.conf", "-g", "daemon off;"))
        ours = stack.enter_context(modelrunner("modelrunner", folder, engine))
        if observed:
            others.append(stack.enter_context(modelrunner("observed", folder / "observed", engine, kind="OBSERVED")))
        if before is not None:
            others.append(stack.enter_context(modelrunner("before", folder / "before", engine, checkout=before)))
        for port in (direct, nginx):
            wait_for(port)
        if litellm_program:
            others.append(stack.enter_context(litellm(folder, litellm_program, direct)))
        if tls:
            wait_for(over_tls, scheme="https")
            others.append(Subject("nginx, TLS", over_tls, master.children()[0], scheme="https"))
        yield [Subject("direct", direct), Subject("nginx", nginx, master.children()[0]), ours, *others]
