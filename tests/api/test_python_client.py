"""modelrunner.Client and AsyncClient against a daemon: typed results, streams, errors, and a daemon of their own."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import modelrunner
from modelrunner.errors import DaemonUnreachable, ModelNotFound, ModelRunnerError
from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG


def address_of(daemon: Daemon) -> str:
    return f"unix://{daemon.settings.socket_path()}"


async def in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(work)


async def test_what_programs_need(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})

    def work() -> None:
        with modelrunner.Client(address_of(daemon)) as client:
            assert {model.name for model in client.models()} == {"smol", "other"}
            assert client.model("smol").name == "smol"
            assert client.why("smol").state == "stopped"
            assert client.fit("smol").fits == "now"
            assert "smol" in client.load("smol").message
            [runner] = client.runners()
            assert (runner.model_name, runner.state) == ("smol", "ready")
            text = client.chat("smol", "hello", max_tokens=3)
            assert text
            assert "".join(client.stream("smol", [{"role": "user", "content": "hello"}], max_tokens=3)) == text
            assert client.complete("smol", "hello", max_tokens=2)["usage"]["completion_tokens"] == 2
            assert next(iter(client.events())).event
            assert client.unload("smol").unloaded_runners == 1
            created = client.create_key("app", models=["smol"])
            [key] = client.keys()
            assert key.name == "app"
            with modelrunner.Client(address_of(daemon), key=created.text) as limited:
                assert limited.address == client.address
            with pytest.raises(ModelRunnerError, match="the last key"):
                client.revoke_key("app")
            assert client.revoke_key("app", leave_open=True).revoked == "app"
            with pytest.raises(ModelNotFound, match="nothing"):
                client.chat("nothing", "hello")
            with pytest.raises(ModelRunnerError, match="temperature"):
                client.chat("smol", "hello", temperature="hot")
            with pytest.raises(ModelNotFound):
                list(client.stream("nothing", "hello"))
            assert any(removal.deleted for removal in client.remove("other"))

    await in_thread(work)


async def test_the_same_for_asyncio(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with modelrunner.AsyncClient(address_of(daemon)) as client:
        assert [model.name for model in await client.models()] == ["smol"]
        text = await client.chat("smol", "hello", max_tokens=3)
        assert "".join([words async for words in client.stream("smol", "hello", max_tokens=3)]) == text
        assert [runner.model_name for runner in await client.runners()] == ["smol"]
        async for event in client.events():
            assert event.event
            break
        with pytest.raises(ModelNotFound):
            await client.why("nothing")


QUESTIONS = [
    {
        "custom_id": str(number),
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    }
    for number, model in enumerate(("smol", "nothing"))
]


async def test_a_batch_and_its_answers(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with modelrunner.AsyncClient(address_of(daemon)) as client:
        sent = await client.send_requests(QUESTIONS)
        made = await client.create_batch(sent.id)
        async with asyncio.timeout(HUNG):
            while (batch := await client.batch(made.id)).status != "completed":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert [each.id for each in await client.batches()] == [made.id]
        assert batch.output_file_id
        assert batch.error_file_id
        (answered,), (failed,) = await client.lines(batch.output_file_id), await client.lines(batch.error_file_id)
        assert answered["response"]["body"]["choices"][0]["message"]["content"]
        assert (answered["custom_id"], failed["custom_id"]) == ("0", "1")
        later = await client.create_batch((await client.send_requests(QUESTIONS[:1])).id)
        assert (await client.cancel_batch(later.id)).id == later.id


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the library's own socket
def test_no_daemon_is_said_with_the_command_that_starts_one(tmp_path: Path) -> None:
    with modelrunner.Client(f"unix://{tmp_path}/none.sock") as client, pytest.raises(DaemonUnreachable, match="serve"):
        client.models()


def test_local_starts_a_daemon_and_ends_the_one_that_it_started(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MODELRUNNER_")}
    variables |= {
        "MODELRUNNER_DATA_DIR": str(tmp_path / "data"),
        "MODELRUNNER_RUNTIME_DIR": str(tmp_path / "run"),
        "MODELRUNNER_CONFIG": str(tmp_path / "config.toml"),
        "MODELRUNNER_LISTEN": "",
    }
    program = (
        "import modelrunner, psutil\n"
        "with modelrunner.local() as client:\n"
        "    assert client.models() == []\n"
        "    [daemon] = psutil.Process().children()\n"
        "    with modelrunner.local() as second:\n"
        "        assert second.address == client.address\n"
        "    assert client.runners() == []\n"
        "assert daemon.status() == psutil.STATUS_ZOMBIE\n"
        "try:\n"
        "    client = modelrunner.Client(client.address)\n"
        "    client.models()\n"
        "except modelrunner.client.DaemonUnreachable:\n"
        "    print('gone')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "gone\n"), ran.stderr


def test_the_daemon_and_the_command_line_do_without_its_library() -> None:
    program = "import sys, modelrunner.cli; assert 'httpx' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
