"""The runtime folder and the socket are removed under a running daemon."""

import asyncio
import shutil
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from modelrunner.daemon import instance as daemons
from modelrunner.daemon.doorway import Doorway
from modelrunner.daemon.system_routes import Addresses
from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG

ASK = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}


async def ready(client: aiohttp.ClientSession) -> tuple[int, str]:
    async with client.get("/ready") as answer:
        return answer.status, (await answer.json()).get("reason", "")


async def until_ready(daemon: Daemon, status: int) -> str:
    async with asyncio.timeout(HUNG):
        while (found := await ready(daemon.tcp))[0] != status:
            pass
    return found[1]


async def test_a_cold_model_starts_without_the_runtime_folder(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    shutil.rmtree(daemon.settings.runtime_dir)
    async with daemon.tcp.post("/v1/chat/completions", json=ASK) as answer:
        assert answer.status == 200, await answer.text()


async def test_a_removed_socket_is_published_again(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    path = daemon.settings.socket
    for remove in (path.unlink, lambda: shutil.rmtree(path.parent)):
        remove()
        async with asyncio.timeout(HUNG):
            while not daemons.answers(path):
                await ready(daemon.tcp)
        assert await ready(daemon.tcp) == (200, "")


async def test_a_folder_that_goes_while_its_socket_is_made_costs_one_more_try(tmp_path: Path) -> None:
    path, going = tmp_path / "run" / "d.sock", list[Path]()

    def place() -> Path:
        path.parent.mkdir(exist_ok=True)
        return path

    class Closes(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()

    async def serve(unix: daemons.UnixListener) -> asyncio.Server:
        server = await asyncio.get_running_loop().create_unix_server(Closes, sock=unix.socket)
        while going:
            shutil.rmtree(going.pop())
        return server

    async def answers() -> bool:
        """The server has closed the connection by the end."""
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:
            return False
        await reader.read()
        writer.close()
        await writer.wait_closed()
        return True

    addresses = Addresses(path, "", tmp_path)
    with closing(Doorway(daemons.UnixListener(place()), addresses, place, lambda socket, listen: None)) as doorway:
        await doorway.open(serve)
        shutil.rmtree(path.parent)
        going.append(path.parent)
        watching = asyncio.create_task(doorway.watch(serve))
        async with asyncio.timeout(HUNG):
            while not (await answers() or watching.done()):
                await asyncio.to_thread(path.exists)
        assert (await answers(), addresses.trouble) == (True, "")
        watching.cancel()
        await asyncio.wait([watching])


async def test_ready_says_that_the_socket_is_gone(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    folder = daemon.settings.runtime_dir
    shutil.rmtree(folder)
    folder.touch()  # in the way of a new one
    reason = await until_ready(daemon, 503)
    assert str(daemon.settings.socket) in reason
    assert "MODELRUNNER_RUNTIME_DIR" in reason
    folder.unlink()
    await until_ready(daemon, 200)
    assert daemons.answers(daemon.settings.socket)


async def test_ready_says_that_the_data_directory_was_moved(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    data = daemon.settings.data_dir
    away = data.rename(data.with_name("away"))
    reason = await until_ready(daemon, 503)
    assert f"the data directory {data} was moved" in reason
    async with daemon.tcp.get("/engines/df") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "folder_missing")
    async with daemon.tcp.post("/models/smol/tag?repo=other") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "folder_missing")
    shutil.rmtree(data, ignore_errors=True)  # with what the daemon has written meanwhile
    away.rename(data)
    await until_ready(daemon, 200)
    async with daemon.tcp.post("/models/smol/tag?repo=other") as answer:
        assert answer.status == 201


async def test_a_default_port_that_is_taken_leaves_the_socket(
    start_daemon: StartDaemon, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemons.bind_tcp("127.0.0.1:0") as other:  # type: ignore[union-attr]
        taken = daemons.address(other).removeprefix("http://")
        monkeypatch.setattr("modelrunner.config.settings.Settings.is_given", lambda settings, name: False)
        daemon = await start_daemon(listen=taken)
        async with daemon.unix.get("/version") as answer:
            assert (await answer.json())["listen"] == ""
    assert taken in caplog.text
    assert "MODELRUNNER_LISTEN" in caplog.text


async def test_a_configured_port_that_is_taken_is_an_error(start_daemon: StartDaemon) -> None:
    with (
        daemons.bind_tcp("127.0.0.1:0") as other,  # type: ignore[union-attr]
        pytest.raises(daemons.AlreadyRunning, match="MODELRUNNER_LISTEN"),
    ):
        await start_daemon(listen=daemons.address(other).removeprefix("http://"))
