"""Leases for requests: the model of a request is resolved, and a runner leased."""

import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec

from modelrunner.aliases import Alias
from modelrunner.engine.runner import check_model
from modelrunner.errors import InsufficientMemory, Misdirected
from modelrunner.gateway.calls import Inference
from modelrunner.gateway.engine_request import MEMBERS
from modelrunner.gateway.routes import check_endpoint
from modelrunner.progress import LoadProgress
from modelrunner.scheduler import Lease, Scheduler, Target
from modelrunner.types import Mode

log = logging.getLogger(__name__)


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


_PROMPT = 1024
"""The bytes of a plain prompt that are its beginning."""


class _MessageRole(msgspec.Struct):
    role: str = ""


def _beginning(ask: Inference) -> int | None:
    """Returns a hash of the beginning of the request's conversation, which its later turns share: the system prompt and
    the messages up to the user's first, or what OpenAI's `prompt_cache_key` names. None for a
    body without any of these."""
    try:
        members = MEMBERS.decode(ask.body)
        if key := members.get("prompt_cache_key"):
            return hash(bytes(key))
        parts = [bytes(members[name]) for name in ("system", "instructions") if name in members]
        messages = members.get("messages") or members.get("input")
        if messages is not None and bytes(messages)[:1] == b"[":
            for message in msgspec.json.decode(messages, type=list[msgspec.Raw]):
                parts.append(bytes(message))
                if msgspec.json.decode(message, type=_MessageRole).role == "user":
                    break
        elif (prompt := messages or members.get("prompt")) is not None:
            parts.append(bytes(prompt)[:_PROMPT])
    except msgspec.MsgspecError:  # the dialect refuses it
        return None
    return hash(tuple(parts)) if parts else None


class Leases:
    """Leases runners of `scheduler` to requests, whose models `resolve` finds."""

    def __init__(self, resolve: Resolve, scheduler: Scheduler) -> None:
        self.resolve = resolve
        self.scheduler = scheduler
        self.aliases: AliasChooser | None = None
        """The names that stand for models; with None, no request looks for one."""

    def known(self, ask: Inference) -> Target | None:
        """Returns the target of a request whose model is resolved already, else None."""
        route = ask.head.route
        return self.resolve.known.get((route.backend, ask.fields.model, route.mode))

    def warm(self, ask: Inference) -> Lease | None:
        """Leases a runner that is ready and free now; None for a request that must wait. Raises `ModelRunnerError` as
        `lease`."""
        head, target = ask.head, self.known(ask)
        if target is not None and head.key is not None:
            head.check_model(target.spec.bundle)
        if head.route.runner is not None:
            return self.lease_runner(ask, head.route.runner, target)
        if target is None:
            return None
        prefix = _beginning(ask) if target.replicas.most > 1 and ask.upload is None else None
        return self.scheduler.warm(target, ask.keep_alive, head.batch, head.owner, prefix)

    async def lease(self, ask: Inference, broken: Lease | None = None) -> Lease:
        """Resolves the model and acquires a lease, see `Scheduler.acquire`. Raises the errors of both."""
        route, target = ask.head.route, await self._target(ask)
        if route.runner is not None:
            lease = self.lease_runner(ask, route.runner, target)
            assert lease is not None
            return lease
        check_endpoint(route.path, target.api.endpoints, target.key.backend, route.instead)
        head = ask.head
        prefix = _beginning(ask) if target.replicas.most > 1 and ask.upload is None else None
        return await self.scheduler.acquire(target, ask.keep_alive, head.caller, head.batch, head.owner, broken, prefix)

    async def _target(self, ask: Inference) -> Target:
        """Resolves the model, once the API key may use it: nobody else learns whether it is here, and what it offers.
        Raises as `Resolve`, and `Forbidden`."""
        route, head, model = ask.head.route, ask.head, ask.fields.model
        if head.key is not None and head.key.key.models:
            head.key.check_model(*self.resolve.names(model))
        await self.resolve.prepare(route.backend, model, route.mode)
        target = self.resolve(route.backend, model, route.mode)
        head.check_model(target.spec.bundle)  # the names may have changed meanwhile
        return target

    async def choose(self, ask: Inference, alias: Alias) -> Inference:
        """Returns the request with a model in place of the client's alias. Raises as `AliasChooser.choose`."""
        route = ask.head.route
        assert self.aliases is not None
        name = await self.aliases.choose(alias, route.backend, route.mode)
        fields = msgspec.structs.replace(ask.fields, model=name)
        return msgspec.structs.replace(ask, fields=fields, alias=None, chosen=name)

    def fallen_back(self, ask: Inference, error: InsufficientMemory) -> Inference:
        """Returns the request with the model that answers in place of one for which there is no memory. Raises `error`
        if its settings name none, or one that the API key may not use, and for a client that chose the engine."""
        target, key = self.known(ask), ask.head.key
        if target is None or target.fallback is None or ask.head.route.backend is not None:
            raise error
        if key is not None and not key.allows(*self.resolve.names(target.fallback)):
            raise error
        log.info("%s: %s answers instead", error.message, target.fallback)
        fields = msgspec.structs.replace(ask.fields, model=target.fallback)
        return msgspec.structs.replace(ask, fields=fields, chosen=target.fallback)

    async def unload(self, ask: Inference) -> None:
        """Ends the runners of the request's model once they are free. Raises as `lease`."""
        target = await self._target(ask)
        await self.scheduler.unload(model_ids=[target.model_id])

    def lease_runner(self, ask: Inference, runner_id: str, target: Target | None) -> Lease | None:
        """Leases the named runner if it serves the model. Returns None while the model is not resolved."""
        lease = self.scheduler.lease_runner(runner_id, ask.head.owner, target)
        try:
            key = lease.runner.key
            if target is None or target.key != key:
                ask.head.check_model(lease.runner.spec.bundle)
            if target is not None:
                if key.mode is not target.key.mode:
                    raise Misdirected(f"runner {runner_id} serves {key.mode}; ask /v1/ for {target.key.mode}")
                if target.key != key:
                    check_model(lease.runner, target.model_id)
                return lease
        except BaseException:
            lease.release()
            raise
        lease.release()
        return None

    def progress(self, ask: Inference) -> LoadProgress:
        """Returns the progress of the load, or of the other work, that a request waits for."""
        target = self.known(ask)
        return LoadProgress(self.resolve.stage) if target is None else self.scheduler.diagnostics.progress(target)
