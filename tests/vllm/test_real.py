"""The real vLLM behind a daemon, beside llama.cpp: what clients see, and what is left when something dies."""

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from modelrunner.store import Store
from modelrunner.testing import alive
from modelrunner_vllm import engines
from tests.e2e.conftest import StartDaemon
from tests.e2e.daemons import Daemon, command_line, until
from tests.e2e.test_context import CONTEXT, all_end_well
from tests.models.prepare import MINILM_SAFETENSORS, SMOLLM2, SMOLLM2_SAFETENSORS
from tests.models.prompts import MESSAGES, PARIS, QUESTION, SYSTEM
from tests.vllm.counters import counter, runner
from tests.vllm.sharedmemory import shared_memory_of

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
LOAD = 300  # seconds


@pytest.fixture(autouse=True)
def nothing_left(no_process_left: None) -> None:
    """Instead of the check after every test: the daemon serves all of them."""


@pytest.fixture(scope="module")
def daemon(installed: Path, make_daemon: StartDaemon) -> Iterator[Daemon]:
    """With both engines."""
    daemon = make_daemon("wheel")
    (daemon.data / "engines" / "vllm").symlink_to(installed)
    assert engines.usable(daemon.data / "engines" / "vllm")
    daemon.start(listen="127.0.0.1:0")  # a port that is closed to vLLM
    yield daemon
    daemon.stop()


def post(daemon: Daemon, path: str, **body: Any) -> httpx.Response:
    with daemon.client(LOAD) as client:
        return client.post(path, json={"model": SMOLLM2_SAFETENSORS, **body})


def chat(
    daemon: Daemon,
    text: str = QUESTION,
    path: str = "/engines/vllm/v1/chat/completions",
    **fields: Any,
) -> httpx.Response:
    messages = [MESSAGES[0], {"role": "user", "content": text}]
    return post(daemon, path, messages=messages, temperature=0, **fields)


def loaded(daemon: Daemon) -> int:
    """The process of the chat model's engine, the only engine of vLLM afterwards."""
    daemon.run("unload", MINILM_SAFETENSORS)  # if it is loaded
    assert chat(daemon, max_tokens=1).status_code == 200
    pid: int = runner(daemon)["pid"]
    return pid


def test_chat(daemon: Daemon) -> None:
    answer = chat(daemon, max_tokens=16)
    assert answer.status_code == 200, answer.text
    assert PARIS in answer.json()["choices"][0]["message"]["content"]


def test_the_command_line_packages_and_asks(daemon: Daemon, prepared: Path) -> None:
    folder = Store(prepared).bundle(SMOLLM2_SAFETENSORS).directory
    packaged = daemon.run("package", "test/packaged", "--safetensors-dir", str(folder))
    assert packaged.returncode == 0, packaged.stderr
    words = ("--system", SYSTEM, "--temperature", "0", "--max-tokens", "40")
    done = daemon.run("run", "test/packaged", *words, QUESTION)
    assert done.returncode == 0, done.stderr
    assert PARIS in done.stdout


def test_the_official_client(daemon: Daemon) -> None:
    """With nothing but its base URL changed."""
    import httpx2
    from openai import OpenAI

    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(daemon.socket))) as http:
        client = OpenAI(base_url="http://localhost/engines/vllm/v1", api_key="unused", http_client=http)
        answer = client.chat.completions.create(model=SMOLLM2_SAFETENSORS, messages=MESSAGES, temperature=0)
        assert SMOLLM2_SAFETENSORS in [model.id for model in client.models.list()]
    assert PARIS in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_fields_that_vllm_does_not_read(daemon: Daemon) -> None:
    """Named, or refused where the answer would mean something else."""
    answer = chat(daemon, max_tokens=1, user="kim", mirostat=2, repetition_penalty=1.1, structured_outputs=None)
    assert (answer.status_code, answer.headers["x-modelrunner-ignored"]) == (200, "user, mirostat")
    refused = post(daemon, "/v1/chat/completions", messages=MESSAGES, grammar='root ::= "x"')
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "grammar")
    followed = chat(daemon, max_tokens=9, guided_json=json.dumps({"enum": ["Paris", "Rome"]}))
    assert json.loads(followed.json()["choices"][0]["message"]["content"]) in ("Paris", "Rome")
    options = {"mirostat": 2, "top_k": 3, "repeat_penalty": 1.1, "num_predict": 1}
    messages = [{"role": "user", "content": "hi"}]
    answer = post(daemon, "/api/chat", messages=messages, options=options, stream=False)
    assert (answer.status_code, answer.headers["x-modelrunner-ignored"]) == (200, "options.mirostat")
    config = {"effort": "low", "format": {"type": "json_schema", "schema": {"enum": ["Paris", "Rome"]}}}
    answer = post(daemon, "/v1/messages", messages=messages, max_tokens=9, output_config=config, inference_geo="us")
    assert (answer.status_code, answer.headers["x-modelrunner-ignored"]) == (200, "inference_geo")
    assert json.loads(answer.json()["content"][0]["text"]) in ("Paris", "Rome")


def test_stream(daemon: Daemon) -> None:
    text = chat(daemon, max_tokens=16, stream=True).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    deltas = [choice["delta"].get("content") or "" for e in events[:-1] for choice in json.loads(e)["choices"]]
    assert PARIS in "".join(deltas)
    assert len(deltas) > 3


def test_completions_with_logprobs(daemon: Daemon) -> None:
    answer = post(daemon, "/v1/completions", prompt="The capital of France is", max_tokens=4, logprobs=3, temperature=0)
    found = answer.json()["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["top_logprobs"]) == 4
    assert all(len(top) >= 3 for top in found["top_logprobs"])


def test_structured_output(daemon: Daemon) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    content = chat(daemon, response_format=form, max_tokens=64).json()["choices"][0]["message"]["content"]
    assert json.loads(content).keys() == {"city", "large"}


def test_a_name_that_came_later_and_a_part_of_one(daemon: Daemon) -> None:
    before = loaded(daemon)
    assert daemon.run("tag", SMOLLM2_SAFETENSORS, "test/later").returncode == 0
    for name in ("test/later", "llama-safetensors"):
        answer = chat(daemon, max_tokens=4, model=name)
        assert answer.status_code == 200, answer.text
    assert runner(daemon)["pid"] == before


def test_each_backend_serves_its_format_and_names_the_other(daemon: Daemon) -> None:
    wrong = chat(daemon, max_tokens=4, model=SMOLLM2)
    assert wrong.status_code == 421
    assert "/engines/llama.cpp/v1/" in wrong.json()["error"]["message"]
    other = post(daemon, "/engines/llama.cpp/v1/completions", prompt="x", max_tokens=1)
    assert other.status_code == 421
    assert "/engines/vllm/v1/" in other.json()["error"]["message"]


def test_both_engines_answer_at_once(daemon: Daemon) -> None:
    assert PARIS in daemon.chat(SMOLLM2, max_tokens=16).text
    assert PARIS in chat(daemon, max_tokens=16).text
    assert {each["backend_name"] for each in daemon.runners()} == {"vllm", "llama.cpp"}


def test_where_one_engine_fits_they_take_turns(daemon: Daemon) -> None:
    """A budget that holds at once, so that vLLM starts once more for this, not twice."""
    loaded(daemon)
    assert daemon.chat(SMOLLM2, max_tokens=1).status_code == 200
    needs = [
        max((each["memory"][w] or {"ram": 0})["ram"] for w in ("estimated", "measured")) for each in daemon.runners()
    ]
    assert daemon.run("unload", SMOLLM2).returncode == 0
    config = Path(daemon.environment["MODELRUNNER_CONFIG"])
    config.write_text(f"memory_budget = {max(needs) + min(needs) // 2}\n")
    assert daemon.run("reload").returncode == 0
    try:
        for model, backend in ((SMOLLM2, "llama.cpp"), (SMOLLM2_SAFETENSORS, "vllm")):
            before = psutil.Process(daemon.runners()[0]["pid"])
            evicted = [before, *before.children(recursive=True)]
            answer = chat(daemon, max_tokens=16, path="/v1/chat/completions", model=model)
            assert answer.status_code == 200, answer.text
            assert PARIS in answer.json()["choices"][0]["message"]["content"]
            assert [each["backend_name"] for each in daemon.runners()] == [backend]
            assert not alive(evicted)
    finally:
        config.write_text("")
        assert daemon.run("reload").returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--context-size", "99999"), "99999 is beyond the 8192"),
        (("--set", 'vllm.hf-overrides={"auto_map": {"AutoModel": "evil.Model"}}'), "auto_map"),
        (("--set", "vllm.trust-remote-code=true"), "trust-remote-code"),
    ],
)
def test_settings_that_are_refused_change_nothing(daemon: Daemon, words: tuple[str, ...], said: str) -> None:
    before = loaded(daemon)
    refused = daemon.run("configure", SMOLLM2_SAFETENSORS, *words)
    assert refused.returncode == 1
    assert said in refused.stderr
    assert chat(daemon, max_tokens=4).status_code == 200
    assert runner(daemon)["pid"] == before


def test_a_client_that_leaves_ends_the_generation(daemon: Daemon) -> None:
    """Long before all of its tokens. vLLM has a counter of what was aborted, which stays 0 for a client
    that leaves, with nobody between as well (docs/vllm.md): what ends is seen."""
    loaded(daemon)
    body = {"model": SMOLLM2_SAFETENSORS, "prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with daemon.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        chunks = answer.iter_raw()  # closes the connection when nobody refers to it any more
        assert b"data: " in next(chunks)
        until(lambda: counter(daemon, "num_requests_running") == 1)
    until(lambda: counter(daemon, "num_requests_running") == 0)


def test_a_lease_lasts_until_vllm_has_dropped_the_request(daemon: Daemon) -> None:
    """The client leaves while a long prompt is computed, of which vLLM knows nothing until the step is over: its
    connection is closed long before. A prompt of the same length tells how long the step takes."""
    loaded(daemon)
    lasted = []
    for leaves in (False, True):
        body = {"model": SMOLLM2_SAFETENSORS, "prompt": f"{leaves} " + "word " * 1800, "max_tokens": 1}
        began = time.monotonic()
        with daemon.client() as client:
            if leaves:
                with contextlib.suppress(httpx.ReadTimeout):
                    client.post("/v1/completions", json=body, timeout=0.5)
            else:
                client.post("/v1/completions", json=body).raise_for_status()
        until(lambda: not runner(daemon)["leases"])
        lasted.append(time.monotonic() - began)
    whole, left = lasted
    assert left > whole / 3


def test_embeddings(daemon: Daemon) -> None:
    answer = post(
        daemon, "/v1/embeddings", model=MINILM_SAFETENSORS, input=["the cat sleeps", "a cat is asleep", "tax"]
    )
    assert answer.status_code == 200, answer.text
    vectors = [entry["embedding"] for entry in answer.json()["data"]]
    near, far = (sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:])
    assert near > far + 0.3


@pytest.mark.parametrize("name", ["modelrunner_serve", "EngineCore"])
def test_an_engine_that_loses_a_process_is_replaced(daemon: Daemon, name: str) -> None:
    """The API server, or the one that computes; the engine that the first test leaves is the one that the second
    breaks."""
    lost = psutil.Process(loaded(daemon))
    before = shared_memory_of(daemon.data / "engines")
    assert before
    tree = [lost, *lost.children(recursive=True)]
    next(process for process in tree if name in command_line(process)).send_signal(signal.SIGKILL)
    until(lambda: not alive(tree))
    until(lambda: not before & shared_memory_of(daemon.data / "engines"))
    assert PARIS in chat(daemon, max_tokens=16).text


def test_streams_that_fit_the_window_end_well_beside_each_other(daemon: Daemon) -> None:
    """The sequences share a cache of one context: vLLM stops a sequence for a while rather than failing it."""
    wanted = ("--context-size", str(CONTEXT), "--parallel", "16", "--restart")
    assert daemon.run("configure", SMOLLM2_SAFETENSORS, *wanted).returncode == 0
    all_end_well(daemon, SMOLLM2_SAFETENSORS)
    back = ("--context-size", "default", "--parallel", "default")
    assert daemon.run("configure", SMOLLM2_SAFETENSORS, *back).returncode == 0


def test_nothing_outlives_a_killed_daemon(daemon: Daemon) -> None:
    assert chat(daemon, max_tokens=4).status_code == 200
    before = shared_memory_of(daemon.data / "engines")
    assert before
    processes = daemon.descendants()
    assert any("EngineCore" in command_line(process) for process in processes)
    daemon.kill()
    until(lambda: not alive(processes))
    daemon.start()
    daemon.stop()
    assert not before & shared_memory_of(daemon.data / "engines")
    daemon.start()  # for the tests after it, in whatever order
