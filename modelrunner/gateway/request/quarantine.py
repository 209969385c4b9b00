"""Finds requests that crash their engine. A request in flight during one crash is retried alone; after two crashes it
is refused. So a request that crashes the engine each time costs the others one retry."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from modelrunner.errors import EngineFailed, EngineProtocolError, ModelRunnerError, Unavailable
from modelrunner.gateway.calls import Inference
from modelrunner.scheduler import Lease
from modelrunner.types import RunnerKey

_MOST = 1024  # remembered bodies; the body that was not seen for the longest time is forgotten first
_TOO_MANY = 2  # engine crashes after which a body is refused
_BLAME_WAIT = 0.25  # seconds until an engine with a broken connection must be found dead

Suspect = tuple[RunnerKey, str, bytes]


class Quarantine:
    """Bodies are kept as digests, for one configuration of the model; a new configuration is a new chance. `alert` is
    True while any request is suspected; otherwise requests need no check."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[Suspect, set[str]] = OrderedDict()
        self._turns: dict[RunnerKey, asyncio.Lock] = {}
        self.alert = False

    def check(self, key: RunnerKey, ask: Inference) -> None:
        """Raises `EngineFailed` for a refused request."""
        deaths = len(self._deaths.get(_suspect(key, ask), ()))
        if deaths >= _TOO_MANY:
            raise EngineFailed(
                f"the engine died {deaths} times while it answered this request, which is not tried again: change the "
                "request, or the model's configuration"
            )

    async def blame(self, lease: Lease, ask: Inference, error: OSError | EngineProtocolError) -> ModelRunnerError:
        """Returns the error for the client of a broken exchange: the engine's last words if it died, which makes the
        request a suspect, else the fault of the connection."""
        if await lease.engine_ended(_BLAME_WAIT):
            failure = lease.runner.failure
            if failure is not None:
                self._died(lease.runner.key, lease.runner.id, ask)
            return failure or Unavailable("the model was unloaded before it answered")
        return error if isinstance(error, EngineProtocolError) else EngineFailed(f"the request failed: {error}")

    async def second_try(
        self, lease: Lease, ask: Inference, error: OSError | EngineProtocolError, *, allowed: bool
    ) -> Callable[[], None]:
        """Ends the lease of a broken exchange, and waits for the request's turn to be asked again. Returns a function
        that ends the turn. Raises the error of `blame` unless the engine died and a second try is `allowed`."""
        failure = await self.blame(lease, ask, error)
        lease.release()
        if not allowed or lease.runner.failure is None:
            raise failure
        return await self.turn(lease.runner.key)

    def _died(self, key: RunnerKey, runner: str, ask: Inference) -> None:
        """Requests with the same body count as one request."""
        suspect = _suspect(key, ask)
        self._deaths.setdefault(suspect, set()).add(runner)
        self._deaths.move_to_end(suspect)
        self.alert = True
        if len(self._deaths) > _MOST:
            self._deaths.popitem(last=False)

    def answered(self, key: RunnerKey, ask: Inference) -> None:
        """Clears a request that the engine survived."""
        self._deaths.pop(_suspect(key, ask), None)
        self.alert = bool(self._deaths)
        if not self.alert:
            self._turns.clear()

    async def turn(self, key: RunnerKey) -> Callable[[], None]:
        """Waits until no other suspect of this runner is retried, so that the next crash shows which request caused it.
        Returns a function that ends the turn; it may be called more than once."""
        lock = self._turns.setdefault(key, asyncio.Lock())
        await lock.acquire()
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                lock.release()

        return end


def _suspect(key: RunnerKey, ask: Inference) -> Suspect:
    return key, ask.head.route.path, ask.digest()
