"""What a key or an address may use: exact at any moment, for all limits at once or for none."""

import heapq
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.errors import RateLimited
from modelrunner.keys.allowances import AddressAllowances, Allowance, Rates, begin_all
from modelrunner.keys.lastminute import WINDOW
from tests.fakes import FakeClock


def refused(allowances: list[Allowance], client: int) -> float | None:
    """The seconds after which the client is to come again, None where it is admitted."""
    try:
        begin_all(allowances, client)
    except RateLimited as error:
        return error.retry_after
    return None


def admits(allowances: list[Allowance], client: int = 1) -> bool:
    return refused(allowances, client) is None


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.lists(st.one_of(st.just("begin"), st.just("end"), st.floats(0.1, 40.0)), max_size=60),
)
def test_no_window_and_no_moment_has_more(requests: int, at_once: int, steps: list[str | float]) -> None:
    clock = FakeClock(0.0)
    allowance = Allowance("it", Rates(requests_per_minute=requests, concurrency=at_once), clock)
    admitted: list[float] = []
    running = 0
    for number, step in enumerate(steps):
        if step == "end":
            if running:
                allowance.end(0, 0, clock())
                running -= 1
        elif isinstance(step, float):
            clock.advance(step)
        elif admits([allowance], number):
            admitted.append(clock.now)
            running += 1
        assert allowance.running == running <= at_once
    assert all(later - earlier >= WINDOW for earlier, later in zip(admitted, admitted[requests:], strict=False))


def test_a_refusal_by_one_costs_nothing_at_the_other() -> None:
    clock = FakeClock(0.0)
    address = Allowance("the address", Rates(requests_per_minute=2), clock)
    busy, free = (Allowance(name, Rates(concurrency=1), clock) for name in ("busy", "free"))
    assert admits([address, busy])
    assert not admits([address, busy])
    assert address.running == 1
    assert admits([address, free])
    assert not admits([address])


@given(
    limits=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    clients=st.lists(st.tuples(st.integers(0, 1), st.integers(2, 3), st.booleans()), min_size=2, max_size=8),
    seed=st.integers(0, 1 << 32),
)
def test_a_client_of_two_limits_that_obeys_is_admitted(
    limits: list[int], clients: list[tuple[int, int, bool]], seed: int
) -> None:
    """Whoever else asks meanwhile: for the same address with other keys, for the same key from other addresses, and
    before the time."""
    chance, clock = Random(seed), FakeClock(0.0)
    allowances = [Allowance(f"{place}", Rates(requests_per_minute=limit), clock) for place, limit in enumerate(limits)]
    admitted: list[list[float]] = [[] for _ in limits]
    coming = [(chance.uniform(0, 90), number, False) for number in range(len(clients))]
    heapq.heapify(coming)
    while coming[0][0] < 8 * WINDOW:
        clock.now, number, in_time = heapq.heappop(coming)
        address, key, obeys = clients[number]
        if (wait := refused([allowances[address], allowances[key]], number)) is not None:
            assert not in_time, f"client {number} came when it was told to, and is told {wait} s"
            told = max(1, math.ceil(wait)) + chance.uniform(0, 0.9)
            heapq.heappush(coming, (clock.now + (told if obeys else chance.uniform(0.1, 20)), number, obeys))
        else:
            for place in (address, key):
                admitted[place].append(clock.now)
                allowances[place].end(0, 0, clock())
            heapq.heappush(coming, (clock.now + chance.choice((0.1, 5.0, 70.0)), number, False))
    for times, limit in zip(admitted, limits, strict=True):
        assert all(b - a >= WINDOW - 1e-6 for a, b in zip(times, times[limit:], strict=False))


def test_a_crowd_with_one_key_keeps_its_address_open_for_other_keys() -> None:
    """What the others are told lies in as many minutes as their key's limit needs: so much of each is kept for them."""
    clock = FakeClock(0.0)
    address = Allowance("the address", Rates(requests_per_minute=3), clock)
    crowded, free = (Allowance(name, Rates(requests_per_minute=limit), clock) for name, limit in (("c", 1), ("f", 9)))
    assert [admits([address, crowded], client) for client in range(30)] == [True] + [False] * 29
    clock.advance(10)
    assert [admits([address, free], client) for client in range(100, 103)] == [True, True, False]


def test_a_changed_limit_keeps_what_was_counted() -> None:
    clock = FakeClock(0.0)
    allowance = Allowance("it", Rates(requests_per_minute=2, tokens_per_minute=100), clock)
    assert [admits([allowance]) for _ in range(2)] == [True, True]
    allowance.rates = Rates(requests_per_minute=3, tokens_per_minute=100)
    assert [admits([allowance]) for _ in range(2)] == [True, False]
    allowance.end(50, 0, clock())
    allowance.rates = Rates(tokens_per_minute=50)
    with pytest.raises(RateLimited, match="50 tokens"):
        allowance.begin(2, 9, clock())
    allowance.begin(2, 0, clock())  # asks no model


def test_what_requests_under_way_were_expected_to_cost_is_settled() -> None:
    clock = FakeClock(0.0)
    allowance = Allowance("it", Rates(tokens_per_minute=100), clock)
    allowance.begin(1, 4 * 60, clock())
    allowance.begin(2, 4 * 60, clock())
    with pytest.raises(RateLimited, match="requests under way take") as refused:
        allowance.begin(3, 9, clock())
    assert refused.value.retry_after == 1
    allowance.end(30, 4 * 60, clock())
    allowance.begin(3, 4 * 60, clock())
    for _ in range(2):
        allowance.end(5, 4 * 60, clock())
    assert [admits([allowance], client) for client in (4, 5)] == [True, True]
    allowance.begin(6, 1 << 30, clock())
    allowance.end(59, 1 << 30, clock())
    allowance.begin(7, 9, clock())


def test_an_ipv6_network_counts_as_one_address() -> None:
    addresses = AddressAllowances(FakeClock(0.0))
    assert addresses.of("10.0.0.1") is None
    addresses.set_rates(Rates(concurrency=1))
    same = [("2001:db8:1:2::1", "2001:db8:1:2:ffff::9"), ("10.0.0.1", "::ffff:10.0.0.1"), ("fe80::1%eth0", "fe80::2")]
    for one, other in same:
        assert addresses.of(one) is addresses.of(other) is not None
    other_networks = ["2001:db8:1:3::1", "10.0.0.2", "::1"]
    found = {id(addresses.of(peer)) for peer in [*other_networks, *(one for one, _ in same)]}
    assert len(found) == 6
    assert addresses.of("") is None


def test_addresses_that_are_idle_are_forgotten() -> None:
    clock = FakeClock(0.0)
    addresses = AddressAllowances(clock)
    addresses.set_rates(Rates(requests_per_minute=1, tokens_per_minute=5))
    busy = addresses.of("10.0.0.1")
    assert busy is not None
    assert admits([busy])
    for number in range(5000):
        one = addresses.of(f"10.1.{number >> 8}.{number & 255}")
        assert one is not None
        assert admits([one])
        one.end(9, 0, clock())
        clock.advance(1)
    assert len(addresses) < 2000
    assert addresses.of("10.0.0.1") is busy  # it has a request under way
