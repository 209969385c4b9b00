"""The half of the pipeline that exchanges use: it resolves the model of a request, and leases a runner."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from modelrunner.aliases import Alias
from modelrunner.errors import Misdirected
from modelrunner.gateway.calls import Inference
from modelrunner.gateway.routes import check_endpoint
from modelrunner.progress import LoadProgress
from modelrunner.scheduler import Lease, Scheduler, Target
from modelrunner.types import Mode


class Resolve(Protocol):
    """Resolves (backend or None, model as the client wrote it, mode) to the scheduler's target. `stage` describes the
    work that requests wait for until their model is resolved."""

    stage: str

    @property
    def known(self) -> Mapping[tuple[str | None, str, Mode], Target]:
        """The targets that are resolved and still valid."""

    async def prepare(self, backend: str | None, model: str, mode: Mode) -> None:
        """Reads, in a thread, the files that a call needs. Raises as a call."""

    def __call__(self, backend: str | None, model: str, mode: Mode) -> Target: ...

    def names(self, model: str) -> tuple[str, ...]:
        """The names that the model is known by; of one that is not here, the name that the client wrote."""


class AliasChooser(Protocol):
    """The names that stand for models here."""

    def find(self, family: str, name: str) -> Alias | None:
        """Returns the alias with this name; `family` is the name of the request's API family."""

    async def choose(self, alias: Alias, backend: str | None, mode: Mode) -> str:
        """Returns the name of the model that answers now. Raises `ModelRunnerError`."""


class Leasing:
    """The half of the pipeline that comes after admission."""

    resolve: Resolve
    scheduler: Scheduler
    aliases: AliasChooser | None

    async def lease(self, ask: Inference) -> Lease:
        """Resolves the model and acquires a lease. Raises the errors of both."""
        route, target = ask.terms.route, await self._target(ask)
        if route.runner is not None:
            lease = self.lease_runner(ask, route.runner, target)
            assert lease is not None
            return lease
        check_endpoint(route.path, target.api.endpoints, target.key.backend, route.instead)
        terms = ask.terms
        return await self.scheduler.acquire(target, ask.keep_alive, terms.caller, terms.batch, terms.owner)

    async def _target(self, ask: Inference) -> Target:
        """Resolves the model, once the API key may use it: nobody else learns whether it is here, and what it offers.
        Raises as `Resolve`, and `Forbidden`."""
        route, terms, model = ask.terms.route, ask.terms, ask.fields.model
        if terms.key is not None and terms.key.key.models:
            terms.key.check_model(*self.resolve.names(model))
        await self.resolve.prepare(route.backend, model, route.mode)
        target = self.resolve(route.backend, model, route.mode)
        terms.check_model(target.spec.bundle)  # the names may have changed meanwhile
        return target

    async def choose(self, ask: Inference, alias: Alias) -> Inference:
        """Returns the request with a model in place of the client's alias. Raises as `AliasChooser.choose`."""
        route = ask.terms.route
        assert self.aliases is not None
        name = await self.aliases.choose(alias, route.backend, route.mode)
        fields = msgspec.structs.replace(ask.fields, model=name)
        return msgspec.structs.replace(ask, fields=fields, alias=None, chosen=name)

    async def unload(self, ask: Inference) -> None:
        """Ends the runners of the request's model once they are free. Raises as `lease`."""
        target = await self._target(ask)
        await self.scheduler.unload(model_ids=[target.key.model_id])

    def lease_runner(self, ask: Inference, runner_id: str, target: Target | None) -> Lease | None:
        """Leases the named runner if it serves the model. Returns None while the model is not resolved."""
        lease = self.scheduler.lease_runner(runner_id, ask.terms.owner)
        try:
            ask.terms.check_model(lease.runner.spec.bundle)
            key = lease.runner.key
            if key.mode is not ask.terms.route.mode:
                raise Misdirected(f"runner {runner_id} serves {key.mode}; ask /v1/ for {ask.terms.route.mode}")
            if target is not None:
                lease.runner.check_model(target.key.model_id)
                return lease
        except BaseException:
            lease.release()
            raise
        lease.release()
        return None

    def progress(self, ask: Inference) -> LoadProgress:
        """Returns the progress of the load, or of the other work, that a request waits for."""
        target = self.resolve.known.get((ask.terms.route.backend, ask.fields.model, ask.terms.route.mode))
        return LoadProgress(self.resolve.stage) if target is None else self.scheduler.diagnostics.progress(target)
