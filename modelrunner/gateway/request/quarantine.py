"""Refuses requests that crash their engine. All that were in flight during a crash are asked again, at first together;
after a second crash the scheduler grants their leases one at a time, so that the third shows which request it was. A
request that was alone with its engine is known after the second."""

from collections import OrderedDict
from dataclasses import dataclass, field

from modelrunner.errors import EngineFailed, EngineProtocolError, HostLost, ModelRunnerError, Unavailable
from modelrunner.gateway.calls import Inference
from modelrunner.scheduler import Lease
from modelrunner.types import RunnerKey

_MOST = 1024  # remembered bodies; the body that was not seen for the longest time is forgotten first
_BLAME_WAIT = 0.25  # seconds until an engine with a broken connection must be found dead
_END_WAIT = (
    10.0  # seconds until one that is known to have failed has ended: a busy machine may take long to clear it away
)

Suspect = tuple[RunnerKey, str, bytes]


@dataclass(slots=True)
class _Deaths:
    """The runners that died over one body; `refused` once it is known to be the reason."""

    runners: set[str] = field(default_factory=set)
    refused: bool = False


class Quarantine:
    """Bodies are kept as digests, for one configuration of the model; a new configuration is a new chance. `alert` is
    True while any request is suspected; otherwise requests need no check."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[Suspect, _Deaths] = OrderedDict()
        self.alert = False

    def check(self, key: RunnerKey, ask: Inference) -> None:
        """Raises `EngineFailed` for a refused request."""
        deaths = self._deaths.get(_suspect(key, ask))
        if deaths is not None and deaths.refused:
            raise EngineFailed(
                f"the engine died {len(deaths.runners)} times while it answered this request, which is not tried "
                "again: change the request, or the model's configuration"
            )

    async def blame(self, lease: Lease, ask: Inference, error: OSError | EngineProtocolError) -> ModelRunnerError:
        """Returns the error for the client of a broken exchange: the engine's last words if it died, which makes the
        request a suspect, else the fault of the connection."""
        ended = await lease.engine_ended(_BLAME_WAIT)
        if not ended and lease.runner.failure is not None:
            ended = await lease.engine_ended(_END_WAIT)
        if ended:
            failure = lease.runner.failure
            if failure is not None and not isinstance(failure, HostLost):
                self._died(lease, ask)
            return failure or Unavailable("the model was unloaded before it answered")
        if isinstance(error, EngineProtocolError):
            return await lease.runner.fault_of_answer(error)
        return EngineFailed(f"the request failed: {error}")

    def _died(self, lease: Lease, ask: Inference) -> None:
        """Requests with the same body count as one request."""
        suspect = _suspect(lease.runner.key, ask)
        deaths = self._deaths.setdefault(suspect, _Deaths())
        deaths.runners.add(lease.runner.id)
        deaths.refused = deaths.refused or len(deaths.runners) >= lease.tries
        self._deaths.move_to_end(suspect)
        self.alert = True
        if len(self._deaths) > _MOST:
            self._deaths.popitem(last=False)

    def answered(self, key: RunnerKey, ask: Inference) -> None:
        """Clears a request that the engine survived."""
        self._deaths.pop(_suspect(key, ask), None)
        self.alert = bool(self._deaths)


def _suspect(key: RunnerKey, ask: Inference) -> Suspect:
    return key, ask.head.route.path, ask.digest()
