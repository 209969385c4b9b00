"""Threads for blocking work: what one purpose does never keeps another waiting."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from modelrunner.concurrency import threads
from modelrunner.concurrency.threads import Pool, in_thread
from modelrunner.errors import Unavailable
from tests.waiting import HUNG


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool("tests", 2, prompt=True)
    yield pool
    pool.shutdown()


async def test_results_and_errors_come_back(pool: Pool) -> None:
    def fail(stop: threading.Event) -> None:
        raise KeyError("x")

    assert await asyncio.gather(*(in_thread(lambda _, n=n: n * n, pool) for n in range(50))) == [  # type: ignore[misc]
        n * n for n in range(50)
    ]
    with pytest.raises(KeyError):
        await in_thread(fail, pool)


async def test_a_system_without_threads_costs_only_the_work_of_that_moment(pool: Pool) -> None:
    before = threading.stack_size(1 << 47)  # more than a process can have
    try:
        failed = await asyncio.gather(*(in_thread(lambda _: 1, pool) for _ in range(5)), return_exceptions=True)
    finally:
        threading.stack_size(before)
    assert [type(each) for each in failed] == [Unavailable] * 5
    assert await asyncio.gather(*(in_thread(lambda _: 1, pool) for _ in range(5))) == [1] * 5


async def test_no_more_run_at_once_than_the_pool_has_threads(pool: Pool) -> None:
    most: list[int] = []
    active = 0
    lock = threading.Lock()

    def work(stop: threading.Event) -> None:
        nonlocal active
        with lock:
            active += 1
            most.append(active)
        with lock:
            active -= 1

    await asyncio.gather(*(in_thread(work, pool) for _ in range(40)))
    assert max(most) <= 2
    assert len(most) == 40


async def test_work_that_has_not_begun_is_dropped_with_its_caller(pool: Pool) -> None:
    gate = threading.Event()
    began: list[int] = []
    blockers = [asyncio.create_task(in_thread(lambda _: gate.wait(HUNG), pool)) for _ in range(2)]
    waiting = asyncio.create_task(in_thread(lambda _: began.append(1), pool))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    gate.set()
    await asyncio.gather(*blockers)
    await in_thread(lambda _: None, pool)
    assert began == []


async def test_work_that_runs_is_told_to_stop_and_waited_for(pool: Pool) -> None:
    running, over = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work(stop: threading.Event) -> None:
        loop.call_soon_threadsafe(running.set)
        assert stop.wait(HUNG)
        over.set()

    task = asyncio.create_task(in_thread(work, pool))
    await running.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert over.is_set()


def test_a_stuck_pool_is_noticed_and_does_not_keep_the_process() -> None:
    now = [0.0]
    pool = Pool("reading", 1, prompt=True, clock=lambda: now[0])
    gate = threading.Event()
    held, waits = pool.submit(gate.wait, 20), pool.submit(int)
    assert threads.stuck() == ""
    now[0] = 60.0
    assert threads.stuck() == "the threads for reading are stuck: work has waited 60 s for one"
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "reading")
    pool.shutdown(wait=False)
    assert waits.cancelled()
    assert threads.stuck() == ""
    with pytest.raises(RuntimeError, match="have ended"):
        pool.submit(int)
    gate.set()
    held.result()
