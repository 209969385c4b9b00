"""`_configure` as clients see it: what is refused, what a change does to runners, what a restart does."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.config.modelconfig import NOTHING_SET, ModelConfiguration
from modelrunner.errors import BadRequest
from modelrunner.store import Store
from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_serving import CHAT, Stream, ask, chat, runners
from tests.models import lora
from tests.store.samples import add_model, write_gguf

CONFIGURE = "/engines/_configure"


async def configure(daemon: Daemon, **changes: Any) -> tuple[int, dict[str, Any]]:
    async with daemon.unix.post(CONFIGURE, json={"model": "smol", **changes}) as answer:
        return answer.status, await answer.json()


async def shown(daemon: Daemon) -> list[dict[str, Any]]:
    async with daemon.unix.get(CONFIGURE, params={"model": "smol"}) as answer:
        found: list[dict[str, Any]] = await answer.json()
    return found


async def event(daemon: Daemon, kind: bytes) -> bytes:
    """The data of the first event of that kind."""
    async with daemon.unix.get("/engines/events", params={"since": "0"}) as feed:
        while await feed.content.readline() != b"event: " + kind + b"\n":
            pass
        return await feed.content.readline()


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"contxt-size": 1}, 400, "did you mean 'context-size'"),
    ({"fak": {"budget": 1}}, 400, "did you mean 'fake'"),
    ({"fak": None}, 400, "unknown setting 'fak'"),
    ({"fake": {"bugdet": 1}}, 400, "unknown setting 'fake.bugdet' for fake; did you mean 'budget'"),
    ({"fake": {"budget": -1}}, 400, "fake.budget: Input should be greater than or equal to 0"),
    ({"fake": {"budget": "__import__('os')"}}, 400, "fake.budget: Input should be a valid integer"),
    ({"fake": 3}, 400, "unknown setting 'fake'; a backend's own settings are a table"),
    ({"context-size": 2049}, 400, "beyond the 2048 tokens"),
    ({"min-context-size": 1024, "context-size": 512}, 400, "min-context-size 1024 is more"),
    ({"context-size": 512, "runtime-flags": ["--ctx-size", "1024"]}, 400, "a runtime flag says 1024"),
    ({"runtime-flags": ["--ctx-size", "4096"]}, 400, "beyond the 2048 tokens"),
    ({"runtime-flags": ["--rm-rf", "/"]}, 400, "no knob"),
    ({"raw-runtime-flags": "--tokens=1 '"}, 400, "No closing quotation"),
    ({"keep_alive": "later"}, 400, "'later' is not a keep-alive"),
    ({"keep_alive": True}, 400, "not a boolean"),
    ({"mode": "dancing"}, 400, "there is no mode 'dancing': completion, embedding, reranking"),
    ({"mode": "mind-reading"}, 400, "there is no mode 'mind-reading': completion, embedding, reranking"),
    ({"replicas": 0}, 400, "replicas"),
    ({"replicas": {"min": 3, "max": 2}}, 400, "replicas.min is more than replicas.max"),
    ({"replicas": {"most": 2}}, 400, "unknown field 'replicas.most'"),
    ({"mode": "reranking", "context-size": 9}, 400, "does not offer reranking"),
    ({"apply": "tomorrow"}, 400, "invalid enum value"),
    ({"lora": ["/nowhere/style.gguf"]}, 404, "there is no LoRA adapter /nowhere/style.gguf"),
    ({"lora": ["style.gguf"]}, 400, "absolute paths"),
    ({"lora": "/nowhere/style.gguf"}, 400, "lora"),
    ({"speculative": {"draft_model": "tiny"}}, 404, "the draft model tiny is not here: `modelrunner pull tiny`"),
    ({"speculative": {"draft_model": "smol", "num_tokens": 0}}, 400, "speculative.num_tokens"),
    ({"speculative": {"draft_model": "other"}}, 400, "another vocabulary (400 words, not 16)"),
    ({"speculative": {"draft_model": "words"}}, 400, "word 7 is 'seven', not 'token7'"),
]


async def test_null_takes_back_a_backends_table_whether_it_was_set_or_not(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    for before in ({}, {"budget": 1}, {}):
        if before:
            await configure(daemon, fake=before)
        status, body = await configure(daemon, fake=None)
        assert (status, body["config"]) == (202, {})


async def test_a_backend_without_adapters_refuses_them(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Configured or packaged with the model."""
    name = "blk.0.weight"
    style = lora.write_gguf(tmp_path / "style.gguf", 64, tensor=name)
    model = write_gguf(tmp_path / "m.gguf", tensors={name: np.zeros((64, 64), np.float32)})
    daemon = await start_daemon(models={"smol": 0}, listen="")
    made = {"from": model.as_uri(), "name": "mine", "lora": [style.as_uri()]}
    async with daemon.unix.post("/models/create", json=made) as answer:
        assert "success: mine is here" in await answer.text()
    async with daemon.unix.get("/models/mine") as answer:
        assert (await answer.json())["adapters"] == [{"name": "style", "scale": 1.0, "size": style.stat().st_size}]
    async with daemon.unix.post(CHAT, json=ask(model="mine")) as answer:
        assert (answer.status, "fake applies no LoRA adapters" in await answer.text()) == (400, True)


async def test_only_the_unix_socket_may_name_adapters(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    body = {"model": "smol", "lora": ["/nowhere/style.gguf"]}
    async with daemon.tcp.post(CONFIGURE, json=body) as answer:
        assert (answer.status, "only over the Unix socket" in await answer.text()) == (403, True)
    async with daemon.tcp.post(CONFIGURE, json=body | {"lora": None}) as answer:
        assert answer.status == 202


async def test_what_cannot_be_is_refused_and_changes_nothing(
    start_daemon: StartDaemon, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    (tmp_path / "data_dir").mkdir()
    store = Store(tmp_path / "data_dir")
    add_model(store, "other", 1, vocabulary=400)
    add_model(store, "words", 2, words={7: "seven"})
    daemon = await start_daemon(models={"smol": 0}, listen="")
    assert (await configure(daemon, parallel=2))[0] == 202
    before = await shown(daemon)
    for changes, status, words in REFUSED:
        with subtests.test(changes=changes):
            found, body = await configure(daemon, **changes)
            assert found == status, body
            assert words in body["error"]["message"]
            assert await shown(daemon) == before


async def test_fields_are_merged_and_flags_become_the_fields_that_they_set(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    await configure(daemon, **{"context-size": 512, "speculative": {"draft_model": "smol", "num_tokens": 3}})
    _, body = await configure(
        daemon,
        **{
            "raw-runtime-flags": "--ctx-size 1024 --tokens=5",
            "speculative": {"min_acceptance_rate": 0.5},
            "fake": {"budget": 7},
            "pin": True,
        },
    )
    assert body["config"] == {
        "context-size": 1024,
        "runtime-flags": ["--tokens=5"],
        "speculative": {"draft_model": "smol", "num_tokens": 3, "min_acceptance_rate": 0.5},
        "fake": {"budget": 7},
        "pin": True,
    }
    assert await chat(daemon.unix) == 200
    (runner,) = await runners(daemon)
    assert (runner["context_size"], runner["pinned"]) == (1024, True)
    _, body = await configure(daemon, **{"speculative": None, "fake": None, "runtime-flags": None, "pin": False})
    assert body["config"] == {"context-size": 1024, "pin": False}
    _, body = await configure(daemon, fake={"budget": 7})
    _, body = await configure(daemon, fake={"budget": None})
    assert body["config"] == {"context-size": 1024, "pin": False}
    (runner,) = await runners(daemon)
    assert runner["pinned"] is False


async def test_a_change_is_for_the_next_load_and_touches_no_runner(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    await chat(daemon.unix)
    (before,) = await runners(daemon)
    for change in ({"keep_alive": "1h"}, {"context-size": 512}):
        assert (await configure(daemon, **change))[0] == 202
        assert await chat(daemon.unix) == 200
        (same,) = await runners(daemon)
        assert (same["id"], same["keep_alive"]) == (before["id"], "1h")
    async with daemon.unix.post("/engines/unload", json={"models": ["smol"]}) as answer:
        assert answer.status == 200
    await chat(daemon.unix)
    (after,) = await runners(daemon)
    assert (after["context_size"], after["keep_alive"]) == (512, "1h")
    assert daemon.backend.runs == 2


async def test_settings_of_one_mode_are_that_modes_alone(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    await configure(daemon, **{"context-size": 1024})
    status, body = await configure(daemon, mode="embedding", **{"context-size": 256})
    assert (status, body["mode"]) == (202, "embedding")
    await chat(daemon.unix)
    await chat(daemon.unix, "/v1/embeddings", input="hello")
    assert {(runner["mode"], runner["context_size"]) for runner in await runners(daemon)} == {
        ("completion", 1024),
        ("embedding", 256),
    }
    assert [(entry["mode"], entry["config"]) for entry in await shown(daemon)] == [
        (None, {"context-size": 1024}),
        ("embedding", {"context-size": 256}),
    ]


async def test_what_needs_no_load_holds_at_once(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[models.smol]\npin = true")
    daemon = await start_daemon(models={"smol": 0}, listen="")
    await chat(daemon.unix)
    await chat(daemon.unix, "/v1/embeddings", input="hello")

    async def kept() -> dict[str, tuple[str, bool]]:
        return {runner["mode"]: (runner["keep_alive"], runner["pinned"]) for runner in await runners(daemon)}

    await configure(daemon, keep_alive="1h")
    assert await kept() == {"completion": ("1h", True), "embedding": ("1h", True)}
    await configure(daemon, mode="embedding", pin=False, keep_alive="2h")
    assert await kept() == {"completion": ("1h", True), "embedding": ("2h", False)}
    await configure(daemon, mode="embedding", pin=None)
    assert await kept() == {"completion": ("1h", True), "embedding": ("2h", True)}
    await chat(daemon.unix, keep_alive="7m")  # what a request asked for stays
    await configure(daemon, keep_alive=None)
    assert await kept() == {"completion": ("7m", True), "embedding": ("2h", True)}


async def test_a_restart_brings_what_was_changed_before_it(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    await chat(daemon.unix)
    await configure(daemon, **{"context-size": 512})
    for changes in ({"context-size": 512}, {}):  # the second time all is as it should be
        status, body = await configure(daemon, apply="restart", **changes)
        assert (status, body["config"]) == (202, {"context-size": 512})
        await chat(daemon.unix)
        assert [r["context_size"] for r in await runners(daemon) if r["state"] == "ready"] == [512]
    assert daemon.backend.runs == 2


async def test_a_draft_models_name_that_now_means_another_is_told(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "data_dir").mkdir()
    add_model(Store(tmp_path / "data_dir"), "other", 1, vocabulary=400)
    daemon = await start_daemon(models={"smol": 0, "same": 2}, listen="")

    async def name(model: str) -> None:
        async with daemon.unix.post(f"/models/{model}/tag", params={"repo": "draft", "tag": "1"}) as answer:
            assert answer.status == 201

    async def ask() -> tuple[int, str]:
        body = {"model": "smol", "messages": []}
        async with daemon.unix.post("/v1/chat/completions", json=body) as answer:
            return answer.status, await answer.text()

    await name("same")
    assert (await configure(daemon, speculative={"draft_model": "draft:1"}))[0] == 202
    assert (await ask())[0] == 200
    await name("other")
    status, text = await ask()
    assert (status, "another vocabulary (400 words, not 16)" in text) == (400, True)
    async with daemon.unix.delete("/models/draft:1") as answer:
        assert answer.status == 200
    status, text = await ask()
    assert (status, "configure smol --draft-model default" in text) == (404, True)
    await name("same")
    assert (await ask())[0] == 200


async def test_a_restart_has_the_new_runner_first_and_no_request_is_lost(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    async with Stream(daemon) as stream:
        (old,) = await runners(daemon)
        daemon.backend.knobs = ()
        status, body = await configure(daemon, apply="restart", **{"context-size": 512})
        assert status == 202
        found = {runner["id"]: runner for runner in await runners(daemon)}
        assert found.pop(old["id"])["state"] == "draining"
        (new,) = found.values()
        assert (new["state"], new["context_size"]) == ("ready", 512)
        assert await chat(daemon.unix) == 200
        assert await stream.content.readline()  # the old one still answers
    assert daemon.backend.runs == 2
    assert body["revision"] > 0


async def test_a_restart_that_fails_leaves_everything_as_it_was(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    await configure(daemon, parallel=2)
    await chat(daemon.unix)
    (old,) = await runners(daemon)
    before = await shown(daemon)
    status, body = await configure(daemon, apply="restart", **{"runtime-flags": ["--crash=no such layer"]})
    assert status == 502
    assert "nothing was changed" in body["error"]["message"]
    assert "no such layer" in body["error"]["message"]
    assert await shown(daemon) == before
    assert await chat(daemon.unix) == 200
    assert [runner["id"] for runner in await runners(daemon)] == [old["id"]]


async def test_a_restart_without_room_for_two_takes_the_old_ones_place(start_daemon: StartDaemon) -> None:
    # The estimate just fits: what the first runner is measured to hold, which may be much less, leaves no room for two.
    daemon = await start_daemon(models={"smol": 0}, listen="", memory_budget=65 << 20)
    await chat(daemon.unix)
    status, body = await configure(daemon, apply="restart", **{"context-size": 512})
    assert status == 202, body
    await asyncio.gather(*(chat(daemon.unix) for _ in range(3)))
    (runner,) = await runners(daemon)
    assert (runner["context_size"], runner["state"]) == (512, "ready")
    status, body = await configure(daemon, apply="restart", **{"runtime-flags": ["--crash=never"]})
    assert status == 502
    assert await chat(daemon.unix) == 200
    (runner,) = await runners(daemon)
    assert runner["context_size"] == 512


async def test_who_waits_for_a_load_gets_the_runner_that_replaces_it(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    daemon.backend.knobs = ("--never-ready",)
    waiting = asyncio.create_task(chat(daemon.unix))
    await event(daemon, b"load")
    daemon.backend.knobs = ()
    assert (await configure(daemon, apply="restart", parallel=2))[0] == 202
    assert await waiting == 200


async def test_a_configuration_is_an_event(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    await configure(daemon, parallel=2)
    assert b'"model":"smol"' in await event(daemon, b"configure")


# A merge patch and the configuration that it makes.
_fields = st.fixed_dictionaries(
    {},
    optional={
        "context-size": st.integers(1, 10**6),
        "parallel": st.integers(1, 256),
        "gpu-layers": st.integers(0, 100),
        "keep_alive": st.sampled_from(["5m", "-1", "0"]),
        "runtime-flags": st.lists(st.text(max_size=8), max_size=3).map(tuple),
        "pin": st.booleans(),
        "speculative": st.fixed_dictionaries({"draft_model": st.just("d")}, optional={"num_tokens": st.integers(1, 9)}),
        "llamacpp": st.dictionaries(st.text(min_size=1, max_size=5), st.integers(), min_size=1, max_size=2),
    },
)


@given(_fields, _fields)
def test_a_configuration_says_what_was_set(first: dict[str, Any], second: dict[str, Any]) -> None:
    one, two = ModelConfiguration.of(first), ModelConfiguration.of(second)
    assert one.as_dict() == first
    assert ModelConfiguration.of(one.as_dict()) == one
    assert one.merged(dict.fromkeys(first)) == NOTHING_SET
    assert one.merged({}) == one
    for merged in (one.merged(second), two.over(one)):
        for name, value in second.items():
            found = merged.as_dict()[name]
            assert found == value or found == {**first[name], **value}


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())))
def test_anything_else_is_a_bad_request_and_no_fault_of_ours(fields: dict[str, Any]) -> None:
    with suppress(BadRequest):
        ModelConfiguration.of(fields)
