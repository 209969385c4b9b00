"""A runner whose engine is a server that runs already: connections to it, and nothing else."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from modelrunner.backend import Backend, ExplainsErrors, RunsElsewhere
from modelrunner.engine.abandoned import Abandoned
from modelrunner.engine.connections import UpstreamPool
from modelrunner.engine.lastwords import fault_of_answer
from modelrunner.engine.runner import EngineProcess
from modelrunner.engineapi import OPENAI
from modelrunner.errors import EngineFailed, EngineProtocolError, ModelRunnerError
from modelrunner.plugins.isolation import call_backend, interface_of
from modelrunner.types import Endpoint, RequiredMemory, RunnerKey, RunSpec, Served


class RemoteRunner:
    """A `Runner` of a backend that `RunsElsewhere`. It is ready at once, has neither a process nor memory here, and
    ends only when it is stopped: a server that does not answer is an error of each request."""

    def __init__(self, backend: Backend, spec: RunSpec, key: RunnerKey, *, id: str, clock: Callable[[], float]) -> None:
        self.id = id
        self.key = key
        self.spec = spec
        self.served = Served(spec.bundle.name, key.backend, id)
        self.names: tuple[str, ...] | None = None
        self.api = OPENAI
        self.upstream = UpstreamPool(Endpoint(host=key.backend, port=0))  # until it is known
        self.abandoned = Abandoned(_settled)
        self.stage = "connecting"
        self.ready_at: float | None = None
        self.failure: ModelRunnerError | None = None
        self.owners: set[str] = set()
        self.sleep_level = 0
        self.process: EngineProcess | None = None
        self._backend = backend
        self._clock = clock

    async def run(self, changed: Callable[[], None], loaded_for: Callable[[], str | None] = lambda: "") -> NoReturn:
        """See `Runner`."""
        try:
            self.api = await call_backend(self._backend.api, self.spec)
            self.names = (self.api.model_name,)
            server = interface_of(self._backend, RunsElsewhere)
            assert server is not None
            self.upstream.move(await call_backend(server.endpoint))
            if (owner := loaded_for()) is not None:
                self.owners.add(owner)
            self.ready_at, self.stage = self._clock(), ""
            changed()
            await asyncio.Event().wait()
            raise EngineFailed("a server elsewhere has no end")
        except ModelRunnerError as error:
            self.failure = error
            raise
        finally:
            self.abandoned.end()
            self.upstream.close()

    def mark_stopping(self) -> None: ...

    def expect(self, memory: RequiredMemory) -> None: ...

    async def memory(self) -> RequiredMemory | None:
        return None

    async def sleep(self) -> None:
        raise EngineFailed(f"{self.key.backend} cannot sleep")

    async def wake(self) -> None:
        raise EngineFailed(f"{self.key.backend} cannot wake up")

    async def request_error(self, status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
        knows = interface_of(self._backend, ExplainsErrors)
        return await call_backend(knows.request_error, status, message, fields) if knows else None

    async def fault_of_answer(self, error: EngineProtocolError) -> EngineProtocolError:
        return await fault_of_answer(error, self._backend)


async def _settled() -> None:
    """The server works for no client whose connection is closed."""
