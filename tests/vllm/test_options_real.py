"""The real engine with adapters, quantized weights, guessed tokens and as a reranker, as the clients of a daemon see
it. Each start takes half a minute, and serves as much as it can."""

import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelrunner.store import Store
from tests.e2e.conftest import StartDaemon
from tests.e2e.daemons import Daemon
from tests.models import int8, lora
from tests.models.oracle import Bert
from tests.models.prepare import RERANKER_SAFETENSORS, SMOLLM2_SAFETENSORS
from tests.models.prompts import PARIS
from tests.vllm.counters import counter

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
QUANTIZED, ADAPTED = "test/int8", "test/adapted"


@pytest.fixture(autouse=True)
def nothing_left(no_process_left: None) -> None:
    """Instead of the check after every test: the daemon serves all of them."""


@pytest.fixture(scope="module")
def daemon(
    installed: Path, make_daemon: StartDaemon, prepared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Daemon:
    """With vLLM, a model of 8 bits beside the one that it was made of, and one with an adapter."""
    model, folder = Store(prepared).bundle(SMOLLM2_SAFETENSORS).directory, tmp_path_factory.mktemp("made")
    daemon = make_daemon(None)
    link = daemon.data / "engines" / "vllm"
    link.parent.mkdir()
    link.symlink_to(installed)
    daemon.start()
    do(daemon, "package", QUANTIZED, "--safetensors-dir", str(int8.convert(model, folder / "int8")))
    noise = lora.write_peft(folder / "noise", model, 0.5)
    do(daemon, "package", ADAPTED, "--safetensors-dir", str(model), "--lora", str(noise))
    return daemon


def do(daemon: Daemon, *words: str) -> None:
    done = daemon.run(*words)
    assert done.returncode == 0, done.stderr


def configure(daemon: Daemon, model: str, *words: str) -> None:
    """For the next start: nothing is loaded then."""
    do(daemon, "unload", "--all")
    do(daemon, "configure", model, *words)


def ask(daemon: Daemon, path: str, **body: Any) -> httpx.Response:
    with daemon.client(300) as client:
        return client.post(path, json=body)


def said(daemon: Daemon, model: str, **fields: Any) -> str:
    answer = daemon.chat(model, max_tokens=16, **fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def guessed_right(daemon: Daemon) -> float:
    """Tokens that the engine has not computed one by one."""
    return counter(daemon, "spec_decode_num_accepted_tokens_total")


def test_a_packaged_adapter_answers(daemon: Daemon) -> None:
    assert "noise (scale 1, " in daemon.run("inspect", ADAPTED).stdout
    adapted = said(daemon, ADAPTED)
    assert adapted != PARIS
    assert said(daemon, ADAPTED, adapter="noise") == adapted
    do(daemon, "unload", "--all")


def test_the_first_configured_adapter_answers_unless_a_request_names_another(daemon: Daemon, tmp_path: Path) -> None:
    """The scale 0 leaves nothing of an adapter."""
    folder = Store(daemon.data).bundle(SMOLLM2_SAFETENSORS).directory
    noise, silent = (lora.write_peft(tmp_path / name, folder, 0.5) for name in ("noise", "silent"))
    configure(daemon, SMOLLM2_SAFETENSORS, "--lora", f"{silent}:0", "--lora", str(noise))
    answer = daemon.chat(SMOLLM2_SAFETENSORS, max_tokens=16)
    assert answer.json()["choices"][0]["message"]["content"] == PARIS
    assert answer.json()["model"] == SMOLLM2_SAFETENSORS
    assert said(daemon, SMOLLM2_SAFETENSORS, adapter="silent") == PARIS
    assert said(daemon, SMOLLM2_SAFETENSORS, adapter="noise") != PARIS
    for wrong in ("other", 7):
        refused = daemon.chat(SMOLLM2_SAFETENSORS, adapter=wrong)
        assert refused.status_code == 400
        assert "there are: silent, noise" in refused.json()["error"]["message"]
    configure(daemon, SMOLLM2_SAFETENSORS, "--lora", "default")


def test_a_configured_chat_template_makes_the_prompt(daemon: Daemon, tmp_path: Path) -> None:
    """The prompt is then the text of the messages alone."""
    template = tmp_path / "plain.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    configure(daemon, SMOLLM2_SAFETENSORS, "--chat-template", str(template))
    messages = [{"role": "user", "content": "One two three"}, {"role": "robot", "content": " four five"}]
    body = {"model": SMOLLM2_SAFETENSORS, "max_tokens": 8, "temperature": 0}
    chat = ask(daemon, "/v1/chat/completions", messages=messages, **body)
    assert chat.status_code == 200, chat.text
    plain = ask(daemon, "/v1/completions", prompt="One two three four five", **body).json()
    assert chat.json()["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert chat.json()["usage"] == plain["usage"]
    configure(daemon, SMOLLM2_SAFETENSORS, "--chat-template", "default")


def test_weights_of_eight_bits_and_tokens_guessed_from_the_prompt(daemon: Daemon) -> None:
    configure(daemon, QUANTIZED, "--draft-ngram", "on", "--draft-tokens", "4")
    assert said(daemon, QUANTIZED) == PARIS
    again = "one two three one two three one two three one two"
    answer = ask(daemon, "/engines/vllm/v1/completions", model=QUANTIZED, prompt=again, max_tokens=12, temperature=0)
    assert answer.status_code == 200, answer.text
    assert guessed_right(daemon) > 0


def test_a_draft_model_guesses_tokens(daemon: Daemon) -> None:
    configure(daemon, SMOLLM2_SAFETENSORS, "--draft-model", QUANTIZED)
    assert said(daemon, SMOLLM2_SAFETENSORS) == PARIS
    assert guessed_right(daemon) > 0


def test_reranking_and_scoring(daemon: Daemon, prepared: Path) -> None:
    """Against the same computed in numpy; vLLM gives a score of one label as a probability."""
    oracle, documents = Bert(Store(prepared).bundle(RERANKER_SAFETENSORS).directory), ["the cat", "dog", "word word"]
    expected = {n: 1 / (1 + math.exp(-oracle.score("cat", text))) for n, text in enumerate(documents)}
    best_first = sorted(expected, key=lambda n: -expected[n])
    for path in ("/v1/rerank", "/rerank", "/engines/vllm/v1/rerank"):
        answer = ask(daemon, path, model=RERANKER_SAFETENSORS, query="cat", documents=documents)
        assert answer.status_code == 200, answer.text
        results = answer.json()["results"]
        assert [each["index"] for each in results] == best_first
        assert {each["index"]: each["relevance_score"] for each in results} == pytest.approx(expected, abs=0.01)
    answer = ask(daemon, "/score", model=RERANKER_SAFETENSORS, queries="cat", documents=documents)
    assert answer.status_code == 200, answer.text
    assert {each["index"]: each["score"] for each in answer.json()["data"]} == pytest.approx(expected, abs=0.01)
    best = ask(daemon, "/v1/rerank", model=RERANKER_SAFETENSORS, query="cat", documents=documents, top_n=1)
    assert [each["index"] for each in best.json()["results"]] == best_first[:1]
    refused = daemon.chat(RERANKER_SAFETENSORS)
    assert refused.status_code == 400
    assert "rerank" in refused.json()["error"]["message"]
