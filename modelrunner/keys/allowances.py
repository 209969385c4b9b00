"""The limits of an API key, and of the clients at one address together: a bucket of requests, one of tokens, and a
number of requests at the same time."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from time import perf_counter
from typing import NamedTuple

from modelrunner.errors import RateLimited

BYTES_PER_TOKEN = 4
"""Estimates the prompt from the size of a request's body: about right for English text."""
MINUTE = 60.0
"""Seconds in which an empty bucket is full again."""
_BUSY_PAUSE = 1.0  # seconds, for Retry-After while too many requests are under way
_LONGEST_PROMPT = 8192  # tokens, of a usual window: a body with pictures has far more bytes than tokens
_FEW = 1024  # addresses that are kept before idle ones are forgotten


class Rates(NamedTuple):
    """The limits of a key or an address; None for no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


class TokenBucket:
    """Holds `limit` units at first and at most, and gets as many again in each minute, evenly. None is no limit, and
    counts nothing."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._missing = 0.0  # units until it is full; more than `limit` for a debt
        self._at = -math.inf  # the time of `_missing`

    def change(self, limit: int | None, now: float) -> None:
        """Sets the limit. What was taken stays taken, but leaves no debt beyond the new limit."""
        if limit != self.limit:
            missing = self.missing(now)
            self.limit, self._missing = limit, min(missing, limit or 0)

    def missing(self, now: float) -> float:
        """Returns how many units the bucket lacks at the time `now`, in seconds."""
        if self._missing:
            self._missing = max(0.0, self._missing - (now - self._at) * self.limit / MINUTE) if self.limit else 0.0
        self._at = now
        return self._missing

    def take(self, amount: int, now: float) -> None:
        """Takes so many units, perhaps more than there are; gives them back for a negative `amount`."""
        if self.limit is not None:
            self._missing = max(0.0, self.missing(now) + amount)

    def wait(self, now: float) -> float:
        """Returns the seconds until the bucket has a unit, 0 if it has one now."""
        if self.limit is None:
            return 0.0
        excess = self.missing(now) + 1 - self.limit
        if excess < 1e-6:  # a rounding error is no wait
            return 0.0
        return excess * MINUTE / self.limit


class Allowance:
    """Counts requests against `rates`. `who` begins the messages ("the key kim"). Times are those of `clock`, in
    seconds. `size` is that of a request's body in bytes. A prompt costs an estimate by its size until its tokens are
    known."""

    def __init__(self, who: str, rates: Rates, clock: Callable[[], float] = perf_counter) -> None:
        self._who = who
        self.clock = clock
        self._requests, self._tokens = TokenBucket(), TokenBucket()
        self._expected = 0  # tokens that are taken for the prompts under way
        self.rates = rates
        self.running = 0

    @property
    def rates(self) -> Rates:
        return self._rates

    @rates.setter
    def rates(self, rates: Rates) -> None:
        """Sets the limits. What was counted against a limit before stays counted, as `TokenBucket.change` says."""
        self._rates, now = rates, self.clock()
        self._requests.change(rates.requests_per_minute, now)
        self._tokens.change(rates.tokens_per_minute, now)

    @property
    def is_idle(self) -> bool:
        """True if a new allowance would decide the same."""
        now = self.clock()
        return not (self.running or self._requests.missing(now) or self._tokens.missing(now))

    def check(self, now: float, *, asks_model: bool = True) -> None:
        """Raises `RateLimited` for a request that would exceed a limit."""
        requests, tokens, concurrency = self._rates
        if asks_model and concurrency is not None and self.running >= concurrency:
            raise RateLimited(f"{self._who} may have {concurrency} requests under way at once", retry_after=_BUSY_PAUSE)
        if wait := self._requests.wait(now):
            raise RateLimited(f"{self._who} may send {requests} requests a minute", retry_after=wait)
        if asks_model and (wait := self._tokens.wait(now)):
            raise RateLimited(f"{self._who} may use {tokens} tokens a minute", retry_after=wait)

    def count(self, now: float) -> None:
        """Takes a request from the requests of the minute."""
        self._requests.take(1, now)

    def begin(self, size: int, now: float) -> None:
        """Counts a request to a model as under way, until `end`."""
        self.running += 1
        if self._tokens.limit is not None:
            self._expected += _estimate(size)
            self._tokens.take(_estimate(size), now)

    def end(self, tokens: int, size: int, now: float) -> None:
        """Ends the count of a request. `tokens` are those of its prompt and its answer."""
        self.running -= 1
        estimate = min(_estimate(size), self._expected)  # 0 for one that began before there was a limit
        self._expected -= estimate
        self._tokens.take(tokens - estimate, now)


def begin_all(allowances: Sequence[Allowance], size: int, now: float) -> None:
    """Counts a request to a model against all allowances, or against none. Raises `RateLimited`."""
    for allowance in allowances:
        allowance.check(now)
    for allowance in allowances:
        allowance.count(now)
        allowance.begin(size, now)


def count_all(allowances: Sequence[Allowance]) -> None:
    """Counts a request that asks no model against the requests a minute of all allowances, or of none. Raises
    `RateLimited`."""
    for allowance in allowances:
        allowance.check(allowance.clock(), asks_model=False)
    for allowance in allowances:
        allowance.count(allowance.clock())


def hold_place(allowances: Sequence[Allowance]) -> Callable[[], None]:
    """Keeps a place among the requests at the same time, for work that goes on after its request. Returns a function
    that frees the place."""
    for allowance in allowances:
        allowance.running += 1

    def free() -> None:
        for allowance in allowances:
            allowance.running -= 1

    return free


class AddressAllowances:
    """The allowance of each client address, all with the same rates. An IPv6 /64 counts as one address, since a site
    assigns addresses within its own (RFC 4291, 2.5.4). Idle allowances are forgotten. `active` is True with a limit."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._rates = Rates()
        self.active = False
        self._allowances: dict[str, Allowance] = {}
        self._look_at = _FEW

    def __len__(self) -> int:
        return len(self._allowances)

    def set_rates(self, rates: Rates) -> None:
        self._rates, self.active = rates, rates != Rates()
        for allowance in self._allowances.values():
            allowance.rates = rates

    def of(self, peer: str) -> Allowance | None:
        """Returns the allowance of this address; None without limits, and for "" (the Unix socket)."""
        if not self.active or not peer:
            return None
        address = network_of(peer)
        allowance = self._allowances.get(address)
        if allowance is None:
            if len(self._allowances) >= self._look_at:
                self._allowances = {one: each for one, each in self._allowances.items() if not each.is_idle}
                self._look_at = max(_FEW, 2 * len(self._allowances))
            allowance = self._allowances[address] = Allowance(f"the address {address}", self._rates, self._clock)
        return allowance


def _estimate(size: int) -> int:
    """Returns about the tokens of a prompt in a body of so many bytes."""
    return min(size // BYTES_PER_TOKEN, _LONGEST_PROMPT)


@lru_cache(maxsize=1024)
def network_of(peer: str) -> str:
    """Returns a client's address, or the network that counts as one; for an IPv4 address on an IPv6 socket, the IPv4
    address."""
    if not peer:
        return ""
    address = ip_address(peer)
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((address.packed, 64), strict=False))
