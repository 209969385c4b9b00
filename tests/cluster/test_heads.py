"""Two heads behind nginx, with the configuration of contrib/."""

import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.cluster.rig import engine_table
from tests.e2e.daemons import Daemon, environment, until
from tests.ports import reserved_port
from tests.pull.models import gguf
from tests.waiting import HUNG

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]


class Heads:
    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.folder, self.ports, self.daemons = folder, ports, list[Daemon]()
        (folder / "model.gguf").write_bytes(gguf())
        for name, port in zip(("first", "second"), ports, strict=False):
            home = folder / name
            home.mkdir()
            (home / "config.toml").write_text(f'hosts = ["models.example:*"]\n{engine_table()}')
            variables = environment(home / "data", home / "run")
            daemon = Daemon(home / "data", home / "run/modelrunner.sock", variables)
            self.daemons.append(daemon)
            daemon.start(listen=f"127.0.0.1:{port}")
            packaged = daemon.run("package", "--gguf", str(folder / "model.gguf"), "m")
            assert packaged.returncode == 0, packaged.stderr
        text = (ROOT / "contrib/nginx.conf").read_text()
        for ours, theirs in (("12434", ports[0]), ("12435", ports[1]), ("8080", ports[2])):
            text = text.replace(str(ours), str(theirs))
        paths = "".join(
            f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        main = f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/log;\nevents {{}}\n"
        (folder / "nginx.conf").write_text(f"{main}http {{\naccess_log off;\n{paths}{text}}}\n")
        command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "log")]
        self.nginx = subprocess.Popen(command)
        until(lambda: (folder / "pid").exists())

    def close(self) -> None:
        self.nginx.terminate()
        self.nginx.wait(HUNG)
        for daemon in self.daemons:
            daemon.stop()


@pytest.fixture
def heads(tmp_path: Path) -> Iterator[Heads]:
    with ExitStack() as stack:
        made = Heads(tmp_path, [stack.enter_context(reserved_port()) for _ in range(3)])
        yield made
        made.close()


def test_a_conversation_stays_at_one_head(heads: Heads) -> None:
    """A response is stored where it was made, and the next one names it. Another head answers once one is dead."""
    places: Counter[str] = Counter()
    url = f"http://127.0.0.1:{heads.ports[2]}"
    with httpx.Client(base_url=url, headers={"Host": "models.example"}, timeout=HUNG, trust_env=False) as client:
        for caller in (f"caller-{number}" for number in range(8)):
            headers, before = {"X-Caller": caller}, None
            for _ in range(3):
                body = {"model": "m", "input": "x", "store": True, "previous_response_id": before}
                answer = client.post("/engines/mine/v1/responses", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                before = answer.json()["id"]
            kept = [
                client.get(f"http://127.0.0.1:{port}/v1/responses/{before}").status_code for port in heads.ports[:2]
            ]
            assert sorted(kept) == [200, 404]
            places[str(kept.index(200))] += 1
        assert set(places) == {"0", "1"}
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
        with client.stream("POST", "/engines/mine/v1/chat/completions", json=body) as stream:
            times = [time.monotonic() for line in stream.iter_lines() if line]
        assert times[-1] - times[0] > 0.1, "40 words in a second were kept back"
        heads.daemons[0].kill()
        for caller in (f"caller-{number}" for number in range(8)):
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            headers = {"X-Caller": caller}
            assert client.post("/engines/mine/v1/chat/completions", json=body, headers=headers).status_code == 200
