"""LoRA adapters of GGUF models: packaged, configured, and refused."""

from pathlib import Path

import pytest

from modelrunner.store import Store
from tests.e2e.conftest import SMOLLM2
from tests.e2e.daemons import Daemon
from tests.models import lora

ADAPTED = "test/adapted"


def said(daemon: Daemon, model: str) -> str:
    answer = daemon.chat(model, max_tokens=12, temperature=0)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def done(daemon: Daemon, *words: str) -> str:
    finished = daemon.run(*words)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_a_packaged_adapter_changes_the_answer_by_its_scale(daemon: Daemon, tmp_path: Path) -> None:
    file, odd = Store(daemon.data).bundle(SMOLLM2).model_file, lora.write_gguf(tmp_path / "odd.gguf")
    plain = said(daemon, SMOLLM2)
    answers = {}
    for scale in ("1", "0"):
        done(daemon, "package", f"{ADAPTED}-{scale}", "--gguf", str(file), "--lora", f"{odd}:{scale}")
        assert f"odd (scale {scale}, " in done(daemon, "inspect", f"{ADAPTED}-{scale}")
        answers[scale] = said(daemon, f"{ADAPTED}-{scale}")
        done(daemon, "rm", "--force", f"{ADAPTED}-{scale}")
    assert answers["0"] == plain != answers["1"]


def test_an_adapter_is_configured_and_taken_back(daemon: Daemon, tmp_path: Path) -> None:
    odd, plain = lora.write_gguf(tmp_path / "odd.gguf"), said(daemon, SMOLLM2)
    done(daemon, "configure", SMOLLM2, "--lora", f"{odd}:0.5", "--restart")
    assert "odd (scale 0.5, " in done(daemon, "inspect", SMOLLM2)
    assert said(daemon, SMOLLM2) != plain
    done(daemon, "configure", SMOLLM2, "--lora", "default", "--restart")
    assert said(daemon, SMOLLM2) == plain


def test_an_adapter_that_is_removed_is_missed_in_words(daemon: Daemon, tmp_path: Path) -> None:
    odd = lora.write_gguf(tmp_path / "odd.gguf")
    done(daemon, "configure", SMOLLM2, "--lora", str(odd))
    done(daemon, "unload", "--all")
    odd.unlink()
    answer = daemon.chat(SMOLLM2)
    assert answer.status_code == 404
    assert f"there is no LoRA adapter {odd}" in answer.json()["error"]["message"]
    done(daemon, "configure", SMOLLM2, "--lora", "default")


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"architecture": "qwen2"}, "is for the architecture 'qwen2', and the model is of 'llama'"),
        (
            {"width": 64},
            "was made for another model: it changes 64 values of blk.0.attn_q.weight where the model has 576",
        ),
        ({"tensor": "blk.99.attn_q.weight"}, "changes blk.99.attn_q.weight, which the model does not have"),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    daemon: Daemon, tmp_path: Path, made: dict[str, object], told: str
) -> None:
    odd = lora.write_gguf(tmp_path / "odd.gguf", **made)  # type: ignore[arg-type]
    refused = daemon.run("configure", SMOLLM2, "--lora", str(odd))
    assert (refused.returncode, told in refused.stderr) == (1, True), refused.stderr
    file = Store(daemon.data).bundle(SMOLLM2).model_file
    refused = daemon.run("package", ADAPTED, "--gguf", str(file), "--lora", str(odd))
    assert (refused.returncode, told in refused.stderr) == (1, True), refused.stderr
