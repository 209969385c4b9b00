"""What a key or an address may use: exact at any moment, for all limits at once or for none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.errors import RateLimited
from modelrunner.keys.allowances import AddressAllowances, Allowance, Rates, begin_all
from modelrunner.keys.limits import WINDOW
from tests.fakes import FakeClock


def admits(allowances: list[Allowance], client: int = 1) -> bool:
    try:
        begin_all(allowances, client)
    except RateLimited:
        return False
    return True


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
                allowance.end(0)
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


def test_a_changed_limit_keeps_what_was_counted() -> None:
    clock = FakeClock(0.0)
    allowance = Allowance("it", Rates(requests_per_minute=2, tokens_per_minute=100), clock)
    assert [admits([allowance]) for _ in range(2)] == [True, True]
    allowance.rates = Rates(requests_per_minute=3, tokens_per_minute=100)
    assert [admits([allowance]) for _ in range(2)] == [True, False]
    allowance.end(50)
    allowance.rates = Rates(tokens_per_minute=50)
    with pytest.raises(RateLimited, match="50 tokens"):
        allowance.begin(2)


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
        one.end(9)
        clock.advance(1)
    assert len(addresses) < 2000
    assert addresses.of("10.0.0.1") is busy  # it has a request under way
