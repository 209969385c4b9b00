"""Limits are exact, and a client that comes when it was told to is admitted."""

import heapq
import math
import random

import pytest

from modelrunner.keys.lastminute import WINDOW, RequestLimit, TokenLimit
from tests.fakes import FakeClock


@pytest.mark.parametrize(("clients", "limit"), [(64, 30), (64, 600), (5, 3), (200, 10), (3, 1)])
def test_clients_that_obey(clients: int, limit: int) -> None:
    """Each asks again at once when it was admitted, and at the told time when it was not."""
    chance, clock = random.Random(clients * limit), FakeClock(0.0)
    requests = RequestLimit(limit, clock)
    coming = [(chance.random(), client, False) for client in range(clients)]
    heapq.heapify(coming)
    admitted: list[float] = []
    while coming[0][0] < 5 * WINDOW:
        clock.now, client, obeys = heapq.heappop(coming)
        wait = requests.admit(client, clock())
        assert wait is None or not obeys
        if wait is None:
            admitted.append(clock.now)
            heapq.heappush(coming, (clock.now + chance.random() / 10, client, False))
        else:
            later = max(1, math.ceil(wait)) + chance.random() / 20
            heapq.heappush(coming, (clock.now + later, client, True))
    assert all(later - earlier >= WINDOW for earlier, later in zip(admitted, admitted[limit:], strict=False)), (
        "more than the limit in one minute"
    )
    assert len(admitted) >= 4 * limit


def test_a_client_that_does_not_come_back_holds_nothing_up() -> None:
    clock = FakeClock(0.0)
    requests = RequestLimit(1, clock)
    assert requests.admit(1, clock()) is None
    for stranger in range(2, 50):
        assert requests.admit(stranger, clock()) is not None
    clock.advance(100 * WINDOW)
    assert requests.admit(99, clock()) is None


def test_coming_early_is_told_the_same_time_again() -> None:
    clock = FakeClock(0.0)
    requests = RequestLimit(1, clock)
    requests.admit(1, clock())
    first = requests.admit(2, clock())
    assert first is not None
    clock.advance(10)
    assert requests.admit(2, clock()) == pytest.approx(first - 10)


def test_tokens_of_the_last_minute() -> None:
    clock = FakeClock(0.0)
    tokens = TokenLimit(100, clock)
    tokens.spend(60, clock())
    clock.advance(10)
    assert tokens.wait() is None
    tokens.spend(60, clock())
    assert tokens.wait() == pytest.approx(50, abs=0.0101)
    clock.advance(50.02)
    assert tokens.wait() is None
    tokens.spend(500, clock())
    assert tokens.wait() == pytest.approx(WINDOW, abs=0.0101)


def test_no_token_is_forgotten_early_and_none_much_too_late() -> None:
    """However densely they are spent."""
    chance, clock = random.Random(5), FakeClock(0.0)
    tokens = TokenLimit(1000, clock)
    spent: list[tuple[float, int]] = []
    refused = 0
    for _ in range(20_000):
        clock.advance(chance.choice((0.0001, 0.001, 0.02, 0.5)))
        if (wait := tokens.wait()) is None:
            spent.append((clock.now, chance.randrange(1, 30)))
            tokens.spend(spent[-1][1], clock())
        last_minute = [(time, count) for time, count in spent[-1000:] if time > clock.now - WINDOW]
        left = sum(count for _, count in last_minute)
        if wait is None:
            assert left - spent[-1][1] < 1000, "it admitted more"
            continue
        refused += 1
        due = 0.0
        for time, count in last_minute:
            if left >= 1000:
                left, due = left - count, time + WINDOW - clock.now
        assert due - 1e-6 <= wait <= due + 0.0101
    assert refused


@pytest.mark.parametrize("limit", [1, 3])
def test_clients_with_a_connection_for_each_request(limit: int) -> None:
    """Promises to closed connections go to those that come next: nobody starves, and impatience pushes nobody back."""
    clock = FakeClock(0.0)
    requests = RequestLimit(limit, clock)
    for client in range(1, limit + 1):
        assert requests.admit(client, clock()) is None
    connections = iter(range(100, 1000))
    waits = []
    for client in (next(connections) for _ in range(50)):
        waits.append(requests.admit(client, clock()))
        requests.leave(client)
    wait = waits[-1]
    assert wait is not None
    assert wait <= WINDOW
    clock.advance(math.ceil(wait))
    assert requests.admit(next(connections), clock()) is None
