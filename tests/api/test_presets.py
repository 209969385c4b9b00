"""Presets: models that differ in what they carry alone share an engine."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_making import asked, make


async def _ask(daemon: Daemon, name: str, **headers: str) -> tuple[int, dict[str, Any]]:
    body = {"model": name, "messages": [{"role": "user", "content": "hello"}]}
    async with daemon.tcp.post("/v1/chat/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def _runners(daemon: Daemon) -> list[dict[str, Any]]:
    async with daemon.unix.get("/engines/ps") as answer:
        return list(await answer.json())


async def test_presets_that_alternate_share_one_load(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--record", str(tmp_path / "record"))
    for name in ("mario", "luigi"):
        await make(daemon, name, system=f"You are {name}.")
    runners = set()
    for name in ["mario", "luigi"] * 10:
        status, answer = await _ask(daemon, name)
        assert status == 200, answer
        [runner] = await _runners(daemon)
        runners.add(runner["id"])
    assert len(runners) == 1
    bodies = [body for body in asked(tmp_path / "record") if "messages" in body]
    assert [b["messages"][0]["content"] for b in bodies] == ["You are mario.", "You are luigi."] * 10
    assert [b["model"] for b in bodies] == ["mario", "luigi"] * 10


async def test_the_answer_names_the_preset_that_another_one_s_engine_serves(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await make(daemon, "mario", system="You are Mario.")
    for name, told in (("smol", None), ("mario", "mario"), ("smol", None)):
        body = {"model": name, "messages": [{"role": "user", "content": "hello"}]}
        async with daemon.tcp.post("/v1/chat/completions", json=body) as answer:
            assert (answer.status, answer.headers.get("X-Modelrunner-Model")) == (200, told)


async def test_a_preset_with_another_window_has_its_own_engine(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await make(daemon, "short", parameters={"num_ctx": 256})
    for name in ("smol", "short"):
        assert (await _ask(daemon, name))[0] == 200
    assert len(await _runners(daemon)) == 2


async def test_what_an_engine_is_started_with_is_set_for_each_preset(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await make(daemon, "mario", system="You are Mario.")
    for configured, engines in (("smol", 2), ("mario", 1)):
        async with daemon.unix.post("/engines/unload", json={"all": True}) as answer:
            assert answer.status == 200
        body = {"model": configured, "context-size": 256}
        async with daemon.unix.post("/engines/_configure", json=body) as answer:
            assert answer.status == 202, await answer.text()
        for name in ("smol", "mario"):
            assert (await _ask(daemon, name))[0] == 200
        assert len(await _runners(daemon)) == engines


async def test_a_preset_answers_after_the_removal_of_its_base(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await make(daemon, "mario", system="You are Mario.")
    for name in ("smol", "mario"):
        assert (await _ask(daemon, name))[0] == 200
    async with daemon.unix.delete("/models/smol") as answer:
        assert answer.status == 200, await answer.text()
    assert (await _ask(daemon, "mario"))[0] == 200
    assert (await _ask(daemon, "smol"))[0] == 404


async def test_presets_are_listed_with_the_engine_that_they_share(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await make(daemon, "mario", system="You are Mario.")
    for name in ("smol", "mario"):
        assert (await _ask(daemon, name))[0] == 200
    [runner] = await _runners(daemon)
    assert (runner["model_name"], list(runner["models"].values())) == ("smol", ["smol", "mario"])
    async with daemon.unix.get("/api/ps") as answer:
        assert [model["name"] for model in (await answer.json())["models"]] == ["smol:latest", "mario:latest"]
    async with daemon.unix.get("/logs?model=mario") as answer:
        assert answer.status == 200
        mine = await answer.read()
    async with daemon.unix.get("/logs?model=smol") as answer:
        assert mine == await answer.read() != b""


async def test_a_pause_is_that_of_all_presets(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await make(daemon, "mario", system="You are Mario.")
    assert (await _ask(daemon, "mario"))[0] == 200
    async with daemon.unix.post("/engines/pause", json={"model": "smol"}) as answer:
        assert answer.status == 200
    assert await _runners(daemon) == []
    async with daemon.unix.get("/engines/why?model=mario") as answer:
        assert (await answer.json())["state"] == "paused"
    async with daemon.unix.delete("/models/smol") as answer:
        assert answer.status == 200
    assert (await _ask(daemon, "mario"))[0] == 200, "the pause went with the model that was paused"


_THINKS = "{{ messages[-1].content }}{% if enable_thinking %}<think>{% endif %}"
_CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
_OLLAMA = ("/api/chat", {"messages": [{"role": "user", "content": "hello"}], "stream": False})
_ANTHROPIC = ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})


@pytest.mark.parametrize(
    ("path", "body", "given"),
    [
        (*_CHAT, {"enable_thinking": False, "level": 2}),
        (_CHAT[0], _CHAT[1] | {"chat_template_kwargs": {"level": 3}}, {"enable_thinking": False, "level": 3}),
        (*_OLLAMA, {"enable_thinking": False, "level": 2}),
        (_OLLAMA[0], _OLLAMA[1] | {"think": True}, {"enable_thinking": True, "level": 2}),
        (*_ANTHROPIC, {"enable_thinking": False, "level": 2}),
        (
            _ANTHROPIC[0],
            _ANTHROPIC[1] | {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True, "level": 2},
        ),
    ],
)
async def test_arguments_of_the_template_are_carried_and_the_request_goes_before(
    start_daemon: StartDaemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    given: dict[str, Any],
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--record", str(tmp_path / "record"))
    plain, reads = daemon.backend.api, frozenset({"messages", "max_tokens", "thinking", "chat_template_kwargs"})
    monkeypatch.setattr(daemon.backend, "api", lambda spec: plain(spec).reading({_ANTHROPIC[0]: reads}))
    template = _THINKS + "{{ level }}"
    made = await make(daemon, "quiet", template=template, parameters={"enable_thinking": False, "level": 2})
    assert made["type"] == "success", made
    async with daemon.tcp.post(path, json={"model": "quiet", **body}) as answer:
        assert answer.status == 200, await answer.text()
    [sent] = [each for each in asked(tmp_path / "record") if "messages" in each]
    assert sent["chat_template_kwargs"] == given


async def test_a_parameter_that_the_template_does_not_have_is_refused(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    assert (await make(daemon, "thinks", template=_THINKS))["type"] == "success"
    told = await make(daemon, "wrong", **{"from": "thinks"}, parameters={"enable_thinkin": False})
    assert "'enable_thinkin'" in str(told)
    assert (await make(daemon, "right", **{"from": "thinks"}, parameters={"enable_thinking": False}))[
        "type"
    ] == "success"
    async with daemon.tcp.get("/models/right/show") as answer:
        shown = await answer.json()
    assert shown["parameters"] == {"enable_thinking": False}
    assert "PARAMETER enable_thinking false\n" in shown["modelfile"]


async def test_arguments_of_the_configuration_apply_at_once(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--record", str(tmp_path / "record"))
    assert (await _ask(daemon, "smol"))[0] == 200
    [before] = await _runners(daemon)
    wanted = {"model": "smol", "template-arguments": {"enable_thinking": False}}
    async with daemon.unix.post("/engines/_configure", json=wanted) as answer:
        assert answer.status == 202, await answer.text()
    assert (await _ask(daemon, "smol"))[0] == 200
    [after] = await _runners(daemon)
    assert after["id"] == before["id"]
    sent = [each.get("chat_template_kwargs") for each in asked(tmp_path / "record") if "messages" in each]
    assert sent == [None, {"enable_thinking": False}]
