"""The mark of a model that `modelrunner check` has tried, in lists, and what takes it away."""

from typing import Any

import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_configure import configure, event

OUTCOME = {"passed": 12, "failed": ["tool call"]}


async def kept(daemon: Daemon, outcome: dict[str, Any] = OUTCOME, model: str = "smol") -> tuple[int, dict[str, Any]]:
    async with daemon.unix.post(f"/models/{model}/check", json=outcome) as answer:
        return answer.status, await answer.json()


async def marks(daemon: Daemon, model: str = "smol") -> list[Any]:
    """What each list and description says of the model's check."""
    found = []
    for path in ("/models", "/v1/models"):
        async with daemon.unix.get(path) as answer:
            listed = await answer.json()
        models = listed["data"] if path == "/v1/models" else listed
        found += [each.get("check") for each in models if model in (each["id"], *each.get("tags", ()))]
        async with daemon.unix.get(f"{path}/{model}") as answer:
            found.append((await answer.json()).get("check"))
    return found


async def test_lists_have_the_last_result_after_a_restart_too(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    assert await marks(daemon) == [None] * 4
    status, check = await kept(daemon)
    assert (status, check) == (200, {**OUTCOME, "time": check["time"], "engine": "fake 1.0"})
    assert (await marks(daemon), await marks(daemon, "other")) == ([check] * 4, [None] * 4)
    assert b"failed: tool call" in await event(daemon, b"check")
    async with daemon.unix.post("/engines/preload", json={"model": "smol"}) as answer:
        await answer.read()
    assert await marks(daemon) == [check] * 4  # of a model that is loaded, too
    async with daemon.unix.post("/shutdown") as answer:
        assert answer.status == 202
    await daemon.task
    daemon = await start_daemon()
    assert await marks(daemon) == [check] * 4
    _, later = await kept(daemon, {"passed": 13, "failed": []})
    assert await marks(daemon) == [later] * 4


async def test_a_result_ends_with_the_settings_or_the_engine_that_it_was_for(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    monkeypatch.setattr(daemon.backend, "version", lambda: "1")
    _, check = await kept(daemon)
    assert check["engine"] == "fake 1"
    await configure(daemon, keep_alive="1h", pin=True)  # no answer depends on these
    assert await marks(daemon) == [check] * 4
    for changes in ({"chat-template": "{{ messages }}"}, {"template-arguments": {"enable_thinking": False}}):
        await configure(daemon, **changes)
        assert await marks(daemon) == [None] * 4
        await configure(daemon, **dict.fromkeys(changes))
        assert await marks(daemon) == [check] * 4
    monkeypatch.setattr(daemon.backend, "version", lambda: "2")
    async with daemon.unix.post("/engines/install-backend", json={"backend": "fake"}) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    assert await marks(daemon) == [None] * 4


@pytest.mark.parametrize(
    ("outcome", "model", "status"),
    [
        ({"passed": 1}, "smol", 400),
        ({"passed": -1, "failed": []}, "smol", 400),
        ({"passed": 1, "failed": ["x"] * 101}, "smol", 400),
        ({"passed": 1, "failed": ["x" * 101]}, "smol", 400),
        ({"passed": 1, "failed": [], "time": 1}, "smol", 400),
        (OUTCOME, "nothing", 404),
    ],
)
async def test_what_is_no_result_of_a_model_here_is_refused(
    start_daemon: StartDaemon, outcome: dict[str, Any], model: str, status: int
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    assert (await kept(daemon, outcome, model))[0] == status
    assert await marks(daemon) == [None] * 4
