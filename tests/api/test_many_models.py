"""What listing models costs, and that it is right all the same."""

from pathlib import Path

from tests.api.conftest import StartDaemon
from tests.gateway.fakes import until
from tests.opened import opened_in


async def test_a_list_reads_no_file_a_second_time(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={f"m{seed}": seed for seed in range(5)})
    async with daemon.unix.get("/models") as answer:
        first = await answer.json()
    folder = daemon.settings.data_dir
    await until((folder / "state" / "abilities.json").exists)  # a thread reads the models at the start, too
    with opened_in(folder) as opened:

        def of_models() -> list[str]:
            """The files of models: those of the daemon's own state are written meanwhile, by tasks of the start."""
            return [path for path in opened if "state" not in Path(path).relative_to(folder).parts]

        async with daemon.unix.get("/models") as answer:
            assert await answer.json() == first
        assert of_models() == []
        async with daemon.unix.post("/models/m1/tag?repo=other") as answer:
            assert answer.status == 201
        changing = of_models()
        async with daemon.unix.get("/models") as answer:
            names = [name for model in await answer.json() for name in model["tags"]]
    assert names == ["m0", "m1", "other", "m2", "m3", "m4"]
    assert of_models() == changing != []


async def test_a_changed_configuration_is_seen_in_the_list_at_once(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"a": 1, "b": 2})

    async def windows() -> list[int]:
        async with daemon.unix.get("/models") as answer:
            return [model["context_window"] for model in await answer.json()]

    before = await windows()
    async with daemon.unix.post("/engines/_configure", json={"model": "a", "context-size": 333}) as answer:
        assert answer.status == 202
    assert await windows() == [333, before[1]]
