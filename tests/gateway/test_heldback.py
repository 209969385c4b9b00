"""Clients over their limit that do not wait as they were told: their refusals wait. No others do."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from modelrunner.gateway.heldback import HeldBack
from modelrunner.keys.allowances import AddressAllowances, Rates
from modelrunner.keys.ring import KeyRing
from tests.gateway.fakes import until
from tests.gateway.harness import CHAT, Answer, Client, Proxy, proxy, request
from tests.gateway.test_observers import Notes


@dataclass
class Time:
    """A clock, and timers that ring when the test moves it."""

    now: float = 1000.0
    timers: list[tuple[float, asyncio.Handle]] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    spread: float = 1.0

    def clock(self) -> float:
        return self.now

    def later(self, seconds: float, then: Callable[[], None]) -> asyncio.Handle:
        self.delays.append(seconds)
        timer = asyncio.Handle(then, (), asyncio.get_running_loop())
        self.timers.append((self.now + seconds, timer))
        return timer

    def ring(self) -> None:
        """Moves the clock to the end of the first timer."""
        self.now, timer = self.timers.pop(0)
        assert not timer.cancelled()
        timer._run()


def limited(served: Proxy, *, most: int = 256, **rates: int) -> Time:
    """Limits every address, by a clock of the test's own."""
    time = Time()
    served.pipeline.held_back = HeldBack(most, time.clock, time.later, lambda: time.spread)
    served.pipeline.addresses = AddressAllowances(time.clock)
    served.pipeline.addresses.set_rates(Rates(**rates))
    return time


async def ask(served: Proxy, client: Client) -> Answer:
    return await client.ask(request(Host=served.host()))


async def ask_early(served: Proxy, client: Client) -> None:
    """Returns once the refusal waits."""
    held = len(served.pipeline.held_back)
    await client.send(request(Host=served.host()))
    await until(lambda: len(served.pipeline.held_back) > held)


async def waiting_client(served: Proxy) -> Client:
    """The one client that an address may have in a minute, after it has asked twice too often: its refusal waits."""
    client = await served.connect(tcp=True)
    assert (await ask(served, client)).status == 200
    assert (await ask(served, client)).status == 429
    await ask_early(served, client)
    return client


async def test_a_client_that_obeys_never_waits(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        time = limited(served, requests_per_minute=1)
        client = await served.connect(tcp=True)
        assert (await ask(served, client)).status == 200
        for _ in range(3):
            refused = await ask(served, client)
            assert refused.status == 429
            time.now += int(refused.headers["retry-after"])
            assert (await ask(served, client)).status == 200
        served.pipeline.addresses.set_rates(Rates(concurrency=0))  # refuses those that obey, too
        for _ in range(3):
            refused = await ask(served, client)
            assert refused.status == 429
            time.now += int(refused.headers["retry-after"])
        assert time.delays == []


async def test_one_that_does_not_waits_longer_each_time_and_is_told_the_truth(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        time = limited(served, requests_per_minute=1)
        client = await served.connect(tcp=True)
        assert (await ask(served, client)).status == 200
        free = time.now + 60
        assert (await ask(served, client)).headers["retry-after"] == "60"
        for _ in range(6):
            await ask_early(served, client)
            time.ring()
            refused = await client.answer()
            assert (refused.status, refused.error["code"]) == (429, "rate_limited")
            assert refused.headers["retry-after"] == str(ceil(free - time.now))
        assert time.delays == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
        time.now += int(refused.headers["retry-after"])
        assert (await ask(served, client)).status == 200
        assert (await ask(served, client)).status == 429  # it obeyed since: at once
        time.spread = 0.0
        await ask_early(served, client)
        assert time.delays[6:] == [0.05]
        time.ring()
        assert (await client.answer()).status == 429


async def test_no_refusal_waits_beyond_the_time_that_it_names(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        time = limited(served, requests_per_minute=1)
        client = await served.connect(tcp=True)
        assert (await ask(served, client)).status == 200
        time.now += 59.75
        assert (await ask(served, client)).status == 429
        time.now += 2.0 - 0.0625  # a slot is promised two seconds ahead at least
        await ask_early(served, client)
        assert time.delays == [0.0625]
        time.ring()
        assert (await client.answer()).headers["retry-after"] == "1"
        assert (await ask(served, client)).status == 200


async def test_others_are_answered_meanwhile_and_in_order(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        time = limited(served, requests_per_minute=1)
        client, other = await waiting_client(served), await served.connect(tcp=True)
        health = request("/health", b"", method="GET", Host=served.host())
        await client.send(health)
        assert (await ask(served, other)).status == 429
        assert (await other.ask(health)).status == 200
        assert len(served.pipeline.held_back) == 1
        time.ring()
        assert [(await client.answer()).status for _ in range(2)] == [429, 200]


async def test_a_client_that_leaves_waits_no_more_and_is_counted(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        time, notes = limited(served, requests_per_minute=1), Notes(served.pipeline.observers)
        client = await waiting_client(served)
        await client.leave()
        await until(lambda: not len(served.pipeline.held_back))
        assert [timer.cancelled() for _, timer in time.timers] == [True]
        assert [(r.asked.route, r.status, r.error) for r in notes.records] == [
            (CHAT, 200, ""),
            (CHAT, 429, "rate_limited"),
            (CHAT, 499, ""),
        ]


async def test_one_key_waits_for_no_other_on_the_same_connection(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        time, notes = limited(served), Notes(served.pipeline.observers)
        served.pipeline.keys = ring = KeyRing(folder / "keys.json")
        made = {name: ring.create(name, concurrency=0)[1] for name in ("kim", "lee")}
        asked = {name: request(Host=served.host(), X_API_Key=text) for name, text in made.items()}
        client = await served.connect(tcp=True)
        assert (await client.ask(asked["kim"])).status == 429
        await client.send(asked["kim"])
        await until(lambda: len(served.pipeline.held_back) == 1)
        time.ring()
        assert (await client.answer()).status == 429
        assert (await client.ask(asked["lee"])).status == 429  # at once
        await client.send(asked["kim"])
        await until(lambda: len(served.pipeline.held_back) == 1)
        time.ring()
        assert (await client.answer()).status == 429
        assert time.delays == [0.1, 0.2]
        assert [record.asked.key for record in notes.records] == ["kim", "kim", "lee", "kim"]


async def test_beyond_so_many_the_answer_comes_at_once_and_the_connection_ends(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        time = limited(served, most=2, requests_per_minute=1)
        clients = [await served.connect(tcp=True) for _ in range(3)]
        assert (await ask(served, clients[0])).status == 200
        for client in clients:
            assert (await ask(served, client)).status == 429
        for client in clients[:2]:
            await ask_early(served, client)
        refused = await ask(served, clients[2])
        assert (refused.status, refused.headers["connection"]) == (429, "close")
        assert await clients[2].closed() == b""
        for client in clients[:2]:
            time.ring()
            refused = await client.answer()
            assert (refused.status, "connection" in refused.headers) == (429, False)


async def test_a_daemon_that_ends_answers_those_that_wait(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        time = limited(served, requests_per_minute=1)
        client, late = await waiting_client(served), await served.connect(tcp=True)
        assert (await ask(served, late)).status == 429
        again = request(Host=served.host())
        await late.send(again[:-1])
        await until(lambda: served.pipeline.buffered > 0)
        served.lanes["tcp"].drain()
        await late.send(again[-1:])
        for refused in (await client.answer(), await late.answer()):
            assert (refused.status, refused.headers["connection"]) == (429, "close")
        assert [await client.closed(), await late.closed()] == [b"", b""]
        assert [timer.cancelled() for _, timer in time.timers] == [True]
