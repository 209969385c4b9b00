"""The limits of an API key, and of the clients at one address together."""

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from time import perf_counter
from typing import NamedTuple

from modelrunner.errors import RateLimited
from modelrunner.keys.lastminute import BYTES_PER_TOKEN, RequestLimit, TokenLimit

_BUSY_PAUSE = 1.0  # seconds, for Retry-After while too many requests are under way
_LONGEST_PROMPT = 8192  # tokens, of a usual window: a body with pictures has far more bytes than tokens
_LARGE_PROMPT = _LONGEST_PROMPT * BYTES_PER_TOKEN
_FEW = 1024  # addresses that are kept before idle ones are forgotten


class Rates(NamedTuple):
    """Requests and tokens in any 60 seconds, and requests at the same time; None for no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


class Allowance:
    """Counts requests against `rates`. `who` begins the messages ("the key kim"). `clock` is in seconds. `size` is that
    of a request's body in bytes, 0 for a request that asks no model and so costs no tokens."""

    def __init__(self, who: str, rates: Rates, clock: Callable[[], float] = perf_counter) -> None:
        self._who = who
        self.clock = clock
        self.requests = RequestLimit(0, clock)
        self._tokens = TokenLimit(0, clock)
        self._expected = 0  # an estimate of the tokens in the prompts under way
        self.rates = rates
        self.running = 0

    @property
    def rates(self) -> Rates:
        return self._rates

    @rates.setter
    def rates(self, rates: Rates) -> None:
        """Sets the limits. What was counted before stays counted."""
        requests, tokens, running = self._rates = rates
        self.requests.limit, self._tokens.limit = requests or 0, tokens or 0
        self._counts_requests, self._counts_tokens = requests is not None, tokens is not None
        self._most_tokens = tokens if tokens is not None else sys.maxsize
        self._most_running = running if running is not None else sys.maxsize
        if tokens is None:
            self._expected = 0

    @property
    def is_idle(self) -> bool:
        """True if a new allowance would decide the same."""
        return self.running == 0 and self.requests.is_idle and self._tokens.is_idle

    def begin(self, client: int, size: int, now: float) -> None:
        """Counts a request until `end`. `client` is a number for each connection, `now` the time of `clock`. Raises
        `RateLimited`."""
        if self.running >= self._most_running or self._tokens.spent + self._expected >= self._most_tokens:
            self.check(size)
        if self._counts_requests and (wait := self.requests.admit(client, now)) is not None:
            raise self.too_many(wait)
        self.running += 1
        if self._counts_tokens:
            self._expected += size // BYTES_PER_TOKEN if size < _LARGE_PROMPT else _LONGEST_PROMPT

    def check(self, size: int) -> None:
        """Raises `RateLimited` as `begin`, except for the number of requests in a minute."""
        _, most_tokens, most_running = self._rates
        if most_running is not None and self.running >= most_running:
            raise RateLimited(
                f"{self._who} may have {most_running} requests under way at once", retry_after=_BUSY_PAUSE
            )
        tokens = self._tokens
        if most_tokens is not None and size and tokens.spent + self._expected >= most_tokens:
            if (wait := tokens.wait()) is not None:
                raise RateLimited(f"{self._who} may use {most_tokens} tokens a minute", retry_after=wait)
            if tokens.spent + self._expected >= most_tokens:
                raise RateLimited(
                    f"{self._who} may use {most_tokens} tokens a minute, and its requests under way take the rest",
                    retry_after=_BUSY_PAUSE,
                )

    def too_many(self, wait: float) -> RateLimited:
        """Returns the error for a request that came too early; `wait` is in seconds."""
        return RateLimited(
            f"{self._who} may send {self._rates.requests_per_minute} requests a minute", retry_after=wait
        )

    def go_on(self, size: int) -> None:
        """Counts a request that was admitted elsewhere, or its continuation, until `end`."""
        self.running += 1
        if self._counts_tokens:
            self._expected += size // BYTES_PER_TOKEN if size < _LARGE_PROMPT else _LONGEST_PROMPT

    def end(self, tokens: int, size: int, now: float) -> None:
        """Ends the count of a request. `tokens` are those of its prompt and its answer."""
        self.running -= 1
        if self._counts_tokens:
            self._expected -= size // BYTES_PER_TOKEN if size < _LARGE_PROMPT else _LONGEST_PROMPT
            if self._expected < 0:  # the request began before there was a limit
                self._expected = 0
            self._tokens.spend(tokens, now)

    def leave(self, client: int) -> None:
        """Called when the connection `client` is closed. Its promised slot goes to the next client."""
        self.requests.leave(client)


def begin_all(allowances: Sequence[Allowance], client: int, size: int = 0) -> None:
    """Counts a request against all allowances, or against none. Raises `RateLimited`."""
    for allowance in allowances:
        allowance.check(size)
    count(allowances, client)
    for allowance in allowances:
        allowance.go_on(size)


def count(allowances: Sequence[Allowance], client: int) -> None:
    """Counts a request against the requests a minute of all allowances, or of none, and against no other limit: it
    needs no `end`. A client that comes too early gets a time at which all of them keep a slot for it. Raises
    `RateLimited`."""
    if not allowances:
        return
    now = allowances[0].clock()
    limited = [allowance for allowance in allowances if allowance.rates.requests_per_minute is not None]
    closed = [allowance for allowance in limited if not allowance.requests.is_open(client, now)]
    if closed:
        at, due = -math.inf, now
        while due > at:
            at = due
            due = max(allowance.requests.promise(client, now, at) for allowance in limited)
        raise closed[0].too_many(at - now)
    for allowance in limited:
        allowance.requests.take(client, now)


class AddressAllowances:
    """The allowance of each client address, all with the same rates. An IPv6 /64 counts as one address, since a site
    assigns addresses within its own (RFC 4291, 2.5.4). Idle allowances are forgotten. `active` is True with a limit."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._rates = Rates()
        self.active = False
        self._found: dict[str, Allowance] = {}
        self._look_at = _FEW

    def __len__(self) -> int:
        return len(self._found)

    def set_rates(self, rates: Rates) -> None:
        self._rates, self.active = rates, rates != Rates()
        for allowance in self._found.values():
            allowance.rates = rates

    def of(self, peer: str) -> Allowance | None:
        """Returns the allowance of this address; None without limits, and for "" (the Unix socket)."""
        if not self.active or not peer:
            return None
        address = _counted_as(peer)
        found = self._found.get(address)
        if found is None:
            if len(self._found) >= self._look_at:
                self._found = {one: allowance for one, allowance in self._found.items() if not allowance.is_idle}
                self._look_at = max(_FEW, 2 * len(self._found))
            found = self._found[address] = Allowance(f"the address {address}", self._rates, self._clock)
        return found

    def leave(self, peer: str, client: int) -> None:
        """Called when the connection `client` from this address is closed."""
        if self._found and (allowance := self._found.get(_counted_as(peer))) is not None:
            allowance.leave(client)


@lru_cache(maxsize=1024)
def _counted_as(peer: str) -> str:
    """Returns the address, or the network that counts as one; for an IPv4 address on an IPv6 socket, the IPv4
    address."""
    if not peer:
        return ""
    address = ip_address(peer)
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((address.packed, 64), strict=False))
