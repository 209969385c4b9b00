"""How real models are run once they are configured."""

import re
from pathlib import Path

from tests.e2e.conftest import GEMMA3, MINILM, SMOLLM2
from tests.e2e.daemons import Daemon


def test_a_draft_model_changes_the_speed_and_not_the_answer(daemon: Daemon) -> None:
    plain = daemon.chat(SMOLLM2, max_tokens=24).json()
    done = daemon.run(
        *("configure", SMOLLM2, "--draft-model", SMOLLM2, "--draft-tokens", "4", "--draft-min-acceptance", "0.1"),
        *("--parallel", "1", "--restart"),
    )
    assert done.returncode == 0, done.stderr
    drafted = daemon.chat(SMOLLM2, max_tokens=24).json()
    assert drafted["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    assert "draft_n" not in plain["timings"]
    assert drafted["timings"]["draft_n_accepted"] > 0
    assert daemon.run("configure", SMOLLM2, "--draft-model", "default", "--parallel", "default").returncode == 0


def test_what_the_conversation_repeats_is_proposed(daemon: Daemon) -> None:
    """The answer stays the same: the model checks each token."""
    text = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen.\n"
    ask = {"model": SMOLLM2, "prompt": text * 4, "max_tokens": 48, "temperature": 0}
    plain = daemon.post("/v1/completions", ask).json()
    done = daemon.run("configure", SMOLLM2, "--draft-ngram", "on", "--parallel", "1", "--restart")
    assert done.returncode == 0, done.stderr
    drafted = daemon.post("/v1/completions", ask).json()
    shown = daemon.run("ps").stdout
    assert daemon.run("configure", SMOLLM2, "--draft-ngram", "off", "--parallel", "default").returncode == 0
    assert drafted["choices"] == plain["choices"]
    timings = drafted["timings"]
    assert timings["draft_n_accepted"] > 0
    assert f"{timings['draft_n_accepted'] / timings['draft_n']:.0%} of {timings['draft_n']} drafts accepted" in shown


def test_a_draft_model_of_another_family_is_refused(daemon: Daemon) -> None:
    done = daemon.run("configure", SMOLLM2, "--draft-model", GEMMA3)
    assert done.returncode == 1
    assert f"cannot draft for {SMOLLM2}: it has another kind of tokenizer (llama, not gpt2)" in done.stderr


def test_a_context_beyond_training_takes_flags_that_stretch_it(daemon: Daemon, engine: str) -> None:
    refused = daemon.run("configure", SMOLLM2, "--context-size", "9216")
    assert "beyond the 8192 tokens" in refused.stderr
    assert "--rope-scaling yarn --rope-scale 2" in refused.stderr
    flags = ["--rope-scaling", "yarn", "--rope-scale", "2"]
    done = daemon.run("configure", SMOLLM2, "--context-size", "9216", "--parallel", "1", "--", *flags)
    if engine == "wheel":
        assert "only llama.cpp's own server" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert daemon.run("unload", SMOLLM2).returncode == 0
    assert daemon.chat(SMOLLM2, max_tokens=2).status_code == 200
    assert re.search(r"n_ctx_slot = 9216", daemon.run("logs", SMOLLM2).stdout)
    back = ("--context-size", "default", "--parallel", "default", "--runtime-flags", "default", "--restart")
    assert daemon.run("configure", SMOLLM2, *back).returncode == 0


def test_every_mode_has_its_own_settings(daemon: Daemon) -> None:
    assert daemon.run("configure", SMOLLM2, "--mode", "embedding", "--context-size", "256").returncode == 0
    assert daemon.post("/v1/embeddings", {"model": SMOLLM2, "input": "hello"}).status_code == 200
    assert daemon.post("/v1/embeddings", {"model": MINILM, "input": "hello"}).status_code == 200
    assert daemon.run("configure", MINILM, "--keep-alive", "1h").returncode == 0
    assert daemon.post("/v1/embeddings", {"model": MINILM, "input": "hello"}).status_code == 200
    runners = {(r["model_name"], r["mode"]): r for r in daemon.runners()}
    assert runners[SMOLLM2, "embedding"]["context_size"] == 256
    assert runners[MINILM, "embedding"]["keep_alive"] == "1h"
    assert daemon.run("unload", "--all").returncode == 0


def test_reload_says_what_it_would_do_and_does_it(daemon: Daemon) -> None:
    daemon.chat(SMOLLM2, max_tokens=1)
    config = Path(daemon.environment["MODELRUNNER_CONFIG"])
    config.write_text(f'[models."{SMOLLM2}"]\ncontext-size = 1024\n')
    for arguments in (["--dry-run"], []):
        done = daemon.run("reload", *arguments)
        assert "its runner ends after its last request" in done.stdout, done.stderr
    daemon.chat(SMOLLM2, max_tokens=1)
    assert [r["context_size"] for r in daemon.runners() if r["state"] == "ready"] == [1024]
    config.write_text("max_quue = 3\n")
    wrong = daemon.run("reload")
    assert (wrong.returncode, "line 1, column 1" in wrong.stderr) == (1, True)
    config.unlink()
    assert daemon.run("reload").returncode == 0
