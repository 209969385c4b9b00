"""What the daemon keeps from its engines, and says of it."""

import tempfile

from tests.api.conftest import StartDaemon


async def test_an_engine_that_can_reach_the_data_directory_is_reported(start_daemon: StartDaemon) -> None:
    """The fake engine writes the folder for temporary files, where the directory lies."""
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.unix.post("/engines/preload", json={"model": "smol"}) as answer:
        assert answer.status == 200
        await answer.text()
    async with daemon.unix.get("/engines/ps") as answer:
        (runner,) = await answer.json()
    gap = f"files in {daemon.settings.data_dir}: it lies in {tempfile.gettempdir()}"
    assert gap in runner["sandbox"]["gaps"]


async def test_status_says_what_no_sandbox_holds(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(sandbox="on")
    async with daemon.unix.get("/version") as answer:
        means, _, never = (await answer.json())["sandbox"].partition("; held for no engine: ")
    assert means
    assert all(word in never for word in ("abstract Unix sockets", "memfd", "space"))
