"""What a key or an address may use: never more than its buckets hold, for all limits at once or for none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.errors import RateLimited
from modelrunner.keys.allowances import (
    MINUTE,
    AddressAllowances,
    Allowance,
    Rates,
    TokenBucket,
    begin_all,
    count_all,
    hold_place,
)
from tests.fakes import FakeClock


def refused(allowances: list[Allowance], size: int = 0) -> float | None:
    """The seconds after which the client is to come again, None where it is admitted."""
    try:
        begin_all(allowances, size, allowances[0].clock())
    except RateLimited as error:
        return error.retry_after
    return None


def admits(allowances: list[Allowance], size: int = 0) -> bool:
    return refused(allowances, size) is None


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.lists(st.one_of(st.just("begin"), st.just("end"), st.floats(0.1, 40.0)), max_size=60),
)
def test_no_time_and_no_moment_has_more(requests: int, at_once: int, steps: list[str | float]) -> None:
    clock = FakeClock(0.0)
    allowance = Allowance("it", Rates(requests_per_minute=requests, concurrency=at_once), clock)
    admitted: list[float] = []
    running = 0
    for step in steps:
        if step == "end":
            if running:
                allowance.end(0, 0, clock())
                running -= 1
        elif isinstance(step, float):
            clock.advance(step)
        elif admits([allowance]):
            admitted.append(clock.now)
            running += 1
        assert allowance.running == running <= at_once
    for first, began in enumerate(admitted):
        for last, ended in enumerate(admitted[first:], first):
            assert last - first + 1 <= requests + (ended - began) * requests / MINUTE + 1e-3


@given(st.integers(1, 1000), st.lists(st.tuples(st.integers(0, 3000), st.floats(0.0, 100.0)), min_size=1, max_size=20))
def test_a_client_that_comes_when_it_was_told_to_is_admitted(limit: int, spent: list[tuple[int, float]]) -> None:
    clock = FakeClock(0.0)
    bucket = TokenBucket(limit)
    for amount, pause in spent:
        bucket.take(amount, clock())
        clock.advance(pause)
        if wait := bucket.wait(clock()):
            clock.advance(wait * 0.9)
            assert bucket.wait(clock()) > 0, "it waited longer than it had to"
            clock.advance(wait * 0.1)
            assert bucket.wait(clock()) == 0


def test_a_refusal_by_one_costs_nothing_at_the_other() -> None:
    clock = FakeClock(0.0)
    address = Allowance("the address", Rates(requests_per_minute=2), clock)
    busy, free = (Allowance(name, Rates(concurrency=1), clock) for name in ("busy", "free"))
    assert admits([address, busy])
    assert not admits([address, busy])
    assert address.running == 1
    assert admits([address, free])
    assert not admits([address])


def test_a_request_that_asks_no_model_counts_among_the_requests_alone() -> None:
    clock = FakeClock(0.0)
    allowance = Allowance("it", Rates(requests_per_minute=2, tokens_per_minute=10, concurrency=1), clock)
    assert admits([allowance], 400)
    count_all([allowance])
    with pytest.raises(RateLimited, match="2 requests a minute") as told:
        count_all([allowance])
    assert told.value.retry_after == pytest.approx(30)


def test_a_changed_limit_keeps_what_was_counted() -> None:
    clock = FakeClock(0.0)
    allowance = Allowance("it", Rates(requests_per_minute=2, tokens_per_minute=100), clock)
    assert [admits([allowance]) for _ in range(2)] == [True, True]
    allowance.rates = Rates(requests_per_minute=3, tokens_per_minute=100)
    assert [admits([allowance]) for _ in range(2)] == [True, False]
    allowance.end(50, 0, clock())
    allowance.rates = Rates(tokens_per_minute=50)
    with pytest.raises(RateLimited, match="50 tokens"):
        begin_all([allowance], 9, clock())
    count_all([allowance])


def test_a_prompt_costs_an_estimate_until_its_tokens_are_known() -> None:
    clock = FakeClock(0.0)
    allowance = Allowance("it", Rates(tokens_per_minute=60), clock)
    assert [admits([allowance], 4 * 59), refused([allowance], 4 * 59)] == [True, None]
    assert refused([allowance]) == pytest.approx(59)
    allowance.end(0, 4 * 59, clock())
    assert admits([allowance], 1 << 30)
    allowance.end(59, 1 << 30, clock())
    assert refused([allowance]) == pytest.approx(59)
    clock.advance(58)
    assert not admits([allowance])
    clock.advance(1.1)
    assert admits([allowance])


def test_a_request_that_began_before_there_was_a_limit_gives_nothing_back() -> None:
    clock = FakeClock(0.0)
    allowance = Allowance("it", Rates(), clock)
    assert admits([allowance], 4000)
    allowance.rates = Rates(tokens_per_minute=10)
    assert admits([allowance], 4 * 10)
    allowance.end(10, 4000, clock())
    assert not admits([allowance])


def test_work_that_goes_on_keeps_its_place() -> None:
    clock = FakeClock(0.0)
    allowance = Allowance("it", Rates(concurrency=1), clock)
    assert admits([allowance])
    free = hold_place([allowance])
    allowance.end(0, 0, clock())
    assert refused([allowance]) == 1
    free()
    assert admits([allowance])


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


def test_a_lower_limit_leaves_no_debt_of_hours() -> None:
    """Neither of what an idle address used long ago, nor of what it uses now."""
    clock = FakeClock(0.0)
    addresses = AddressAllowances(clock)
    addresses.set_rates(Rates(requests_per_minute=600))
    busy, idle = addresses.of("10.0.0.1"), addresses.of("10.0.0.2")
    assert busy is not None
    assert idle is not None
    for _ in range(500):
        assert admits([idle])
    clock.advance(60)
    for _ in range(500):
        assert admits([busy])
    addresses.set_rates(Rates(requests_per_minute=6))
    assert admits([idle])
    assert not admits([busy])
    clock.advance(10)
    assert admits([busy])
