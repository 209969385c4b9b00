"""What runs, when it ends, and that nothing outlives a daemon that is killed."""

import threading

import httpx
import psutil
import pytest

from tests.e2e.conftest import GEMMA3, SMOLLM2, StartDaemon
from tests.e2e.daemons import Daemon, until
from tests.e2e.engines import counter, processing, sent
from tests.waiting import HUNG, has_ended


def gone(processes: list[psutil.Process]) -> bool:
    return all(map(has_ended, processes))


def test_two_models_where_one_fits_take_turns(make_daemon: StartDaemon, engine: str) -> None:
    daemon = make_daemon(engine)
    daemon.start(listen="")
    sizes = []
    for model in (SMOLLM2, GEMMA3):
        assert daemon.chat(model, max_tokens=4).status_code == 200
        runner = next(r for r in daemon.runners() if r["model_name"] == model)
        sizes.append(max((runner["memory"][w] or {"ram": 0})["ram"] for w in ("estimated", "measured")))
    daemon.stop()

    daemon.start(memory_budget=str(max(sizes) + min(sizes) // 2))
    resident: list[list[str]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            resident.append([runner["model_name"] for runner in daemon.runners()])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for model in (SMOLLM2, GEMMA3, SMOLLM2):
            answer = daemon.chat(model, max_tokens=4)
            assert answer.status_code == 200, answer.text
            assert daemon.runners()[0]["model_name"] == model
    finally:
        over.set()
        watcher.join()
    daemon.stop()
    assert max(len(names) for names in resident) == 1
    assert {name for names in resident for name in names} == {SMOLLM2, GEMMA3}


def test_a_short_keep_alive_ends_the_process(daemon: Daemon) -> None:
    """The usual one is longer than any wait of these tests."""
    before = {process.pid for process in daemon.descendants()}
    assert daemon.chat(SMOLLM2, max_tokens=4, keep_alive="5s").status_code == 200
    engines = [p for p in daemon.descendants() if p.pid not in before] or daemon.descendants()
    assert engines
    runner = next(r for r in daemon.runners() if r["model_name"] == SMOLLM2)
    assert runner["keep_alive"] == "5s"
    until(lambda: not [r for r in daemon.runners() if r["id"] == runner["id"]])
    until(lambda: not psutil.pid_exists(runner["pid"]))


def test_unload_now_and_a_keep_alive_of_zero(daemon: Daemon) -> None:
    assert daemon.chat(SMOLLM2, max_tokens=4, keep_alive=-1).status_code == 200
    assert next(r for r in daemon.runners() if r["model_name"] == SMOLLM2)["expires_at"] is None
    assert daemon.run("unload", SMOLLM2).returncode == 0
    assert SMOLLM2 not in [r["model_name"] for r in daemon.runners()]
    assert daemon.chat(SMOLLM2, max_tokens=4, keep_alive=0).status_code == 200
    until(lambda: SMOLLM2 not in [r["model_name"] for r in daemon.runners()])


@pytest.mark.parametrize("first_token", [False, True], ids=["before the first token", "in the middle"])
def test_a_client_that_leaves_stops_the_generation(daemon: Daemon, first_token: bool) -> None:
    assert daemon.chat(SMOLLM2, max_tokens=1).status_code == 200
    runner = next(r for r in daemon.runners() if r["model_name"] == SMOLLM2 and r["mode"] == "completion")
    before = counter(daemon, "n_decode_total")
    text = "word " * (10 if first_token else 6000)
    fields = {"model": SMOLLM2, "prompt": text, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    if first_token:
        with daemon.client() as client, client.stream("POST", "/v1/completions", json=fields) as answer:
            next(answer.iter_raw())
    else:
        with sent(daemon, "/v1/completions", fields):
            until(lambda: processing(daemon) == 1)
    until(lambda: [r["leases"] for r in daemon.runners() if r["id"] == runner["id"]] == [0])
    until(lambda: processing(daemon) == 0)  # after the rest of the batch that it was at
    assert counter(daemon, "n_decode_total") - before < 2000, "tokens were computed for nobody"


@pytest.mark.parametrize("moment", ["loads", "streams"])
def test_no_engine_outlives_a_killed_daemon(make_daemon: StartDaemon, engine: str, moment: str) -> None:
    daemon = make_daemon(engine)
    daemon.start()
    fields = {"model": SMOLLM2, "prompt": "Once", "stream": True, "max_tokens": 4000, "ignore_eos": True}
    streaming = threading.Event()

    def ask() -> None:
        try:
            with daemon.client() as client, client.stream("POST", "/v1/completions", json=fields) as answer:
                for _ in answer.iter_raw():
                    streaming.set()
        except httpx.TransportError:
            pass

    client = threading.Thread(target=ask)
    client.start()
    if moment == "streams":
        assert streaming.wait(HUNG)
    until(daemon.runners)
    processes = until(daemon.descendants)
    daemon.kill()
    until(lambda: gone(processes))
    client.join()
    daemon.start()
    assert daemon.chat(SMOLLM2, max_tokens=4).status_code == 200
    daemon.stop()
    assert [path.name for path in daemon.socket.parent.iterdir() if path.suffix == ".sock"] == []
