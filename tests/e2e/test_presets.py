"""Presets of one model on a real engine: what each carries reaches it, and no other is loaded for it."""

from pathlib import Path
from typing import Any

from tests.e2e.conftest import SMOLLM2
from tests.e2e.daemons import Daemon

TEMPLATE = "{{ messages[-1].content }}{% if enable_thinking is defined and not enable_thinking %} off{% endif %}"


def test_presets_of_a_modelfile_share_an_engine_and_differ_in_their_template(daemon: Daemon, tmp_path: Path) -> None:
    for name, thinks in (("loud", "true"), ("quiet", "false")):
        file = tmp_path / name
        file.write_text(f'FROM {SMOLLM2}\nTEMPLATE """{TEMPLATE}"""\nPARAMETER enable_thinking {thinks}\n')
        made = daemon.run("create", name, "-f", str(file))
        assert made.returncode == 0, made.stderr
    ids = set()
    for _ in range(3):
        for name, prompt in (("loud", "Hello"), ("quiet", "Hello off")):
            body: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "Hello"}]}
            assert daemon.post("/v1/apply-template", body).json()["prompt"] == prompt
            asked = body | {"chat_template_kwargs": {"enable_thinking": False}}
            assert daemon.post("/v1/apply-template", asked).json()["prompt"] == "Hello off"
            answer = daemon.chat(name, max_tokens=1)
            assert answer.status_code == 200
            assert answer.headers.get("x-modelrunner-model", answer.json()["model"]) == name
            ids |= {runner["id"] for runner in daemon.get("/engines/ps").json() if name in runner["models"].values()}
    assert len(ids) == 1
    for name in ("loud", "quiet"):
        assert daemon.run("rm", name).returncode == 0
