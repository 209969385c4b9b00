"""Installs, updates and removes engines, also for the first request that needs one, and tells their states."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from modelrunner.backend import Backend, BackendState, BackendStatus, InstallProgress, ProgressCallback, Updates
from modelrunner.concurrency.joint import JointWork
from modelrunner.durable import translated
from modelrunner.errors import Conflict, ModelRunnerError
from modelrunner.models.resolve import BeingInstalled, EngineMissing, Resolver
from modelrunner.plugins.isolation import call_backend, interface_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.progress import ProgressReport, WorkProgress
from modelrunner.scheduler import Scheduler, Target
from modelrunner.types import Mode

log = logging.getLogger(__name__)


class Installer:
    """Each backend has one piece of work at a time; it belongs to the daemon and continues after the client that asked
    for it has left. `changed()` is called whenever a backend was changed."""

    def __init__(self, registry: BackendRegistry, scheduler: Scheduler, changed: Callable[[], None]) -> None:
        self._registry = registry
        self._scheduler = scheduler
        self._changed = changed
        self._running: dict[str, tuple[tuple[Any, ...], JointWork[WorkProgress, str]]] = {}

    async def run(self, action: str, name: str, options: dict[str, Any], watcher: ProgressReport) -> str:
        """Does `action` ("install", "update", "uninstall") or joins the same action under way; returns a final message.
        `options` go to the backend. Raises `BackendNotFound`, `Conflict` (another action of the same backend is under
        way, or the engine is in use), and what the backend raises."""
        backend = self._registry.get(name)
        wanted = (action, *options.items())
        what, work = self._running.get(name) or (wanted, self._start(action, backend, options))
        if what != wanted:
            raise Conflict(f"{what[0]} of {name} is under way: wait for it to end")
        return await work.follow(watcher)

    async def need(self, name: str, watcher: ProgressReport) -> None:
        """Installs the engine of the backend `name` if it is missing, or waits for the action under way. Raises as
        `run`."""
        if name not in self._running:  # else what the backend says may be of before the end of that action
            status = await asyncio.to_thread(self._registry.get(name).status)
            if status.state is BackendState.RUNNING:
                return
        if running := self._running.get(name):
            await running[1].follow(watcher)
        else:
            await self.run("install", name, {}, watcher)

    async def close(self) -> None:
        """Cancels the actions under way; a backend leaves no incomplete installation behind."""
        tasks = [work.task for _, work in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, action: str, backend: Backend, options: dict[str, Any]) -> JointWork[WorkProgress, str]:
        async def do(report: ProgressReport) -> str:
            def told(step: InstallProgress) -> None:
                report(WorkProgress(step.message, action, step.total, step.current))

            return await self._do(action, backend, options, told)

        work: JointWork[WorkProgress, str] = JointWork(do, stops_alone=False, name=f"{action} {backend.name}")
        self._running[backend.name] = (action, *options.items()), work
        work.task.add_done_callback(lambda task: self._ended(backend.name, task))
        return work

    async def _do(self, action: str, backend: Backend, options: dict[str, Any], report: ProgressCallback) -> str:
        with translated(f"the {action} of {backend.name}", backend.context.cache):
            match action:
                case "install":
                    await backend.install(report, **options)
                case "update":
                    await self._free(backend)
                    updates = interface_of(backend, Updates)
                    await (updates.update if updates else backend.install)(report, **options)
                case _:
                    await self._free(backend)
                    await backend.uninstall()
        log.info("%s of %s done", action, backend.name)
        status = await call_backend(backend.status)
        self._scheduler.events.emit("install", reason=f"{action} of {backend.name}", status=str(status))
        return f"{backend.name}: {status}"

    async def _free(self, backend: Backend) -> None:
        """Stops the backend's idle runners. Raises `Conflict` if one is in use."""
        kept = (await self._scheduler.unload(backend=backend.name)).kept
        if kept:
            raise Conflict(f"{backend.name} is in use: stop its models first (`modelrunner stop MODEL`)")

    def _ended(self, name: str, task: "asyncio.Task[str]") -> None:
        del self._running[name]
        self._changed()
        if not task.cancelled() and (
            error := task.exception()
        ):  # waiting callers get it too, but all of them may have left
            self._scheduler.events.emit("install", reason=f"{task.get_name()} failed: {error}")
            log.error("%s: %s", task.get_name(), error, exc_info=None if isinstance(error, ModelRunnerError) else error)


class InstallOnDemand:
    """Resolves the models of requests as `Resolver` does, and installs a missing engine if its backend allows that.
    `stage` is the step that unresolved requests wait
    for."""

    def __init__(self, resolver: Resolver, installer: Installer) -> None:
        self._resolver = resolver
        self._installer = installer
        self.stage = "queued"
        self.known, self.names = resolver.known, resolver.names

    def __call__(self, backend: str | None, model: str, mode: Mode) -> Target:
        return self._resolver(backend, model, mode)

    async def prepare(
        self, backend: str | None, model: str, mode: Mode, report: ProgressReport = lambda line: None
    ) -> None:
        """Resolves the model, and installs its engine if that is missing; `report` is called with the progress of the
        installation. Raises as `Resolver.prepare` does, and what an installation raises."""

        def watch(progress: WorkProgress) -> None:
            self.stage = progress.message
            report(progress)

        try:
            await self._resolver.prepare(backend, model, mode)
        except (EngineMissing, BeingInstalled) as error:
            if not error.backend.installs_on_demand:
                raise
            try:
                await self._installer.need(error.backend.name, watch)
            finally:
                self.stage = "queued"
            await self._resolver.prepare(backend, model, mode)


class Statuses:
    """The states of the backends. A backend may have to run its engine to learn its state, so a thread asks it, once
    for all callers at the same time."""

    def __init__(self, registry: BackendRegistry) -> None:
        self._registry = registry
        self._asking: JointWork[None, dict[str, BackendStatus]] | None = None

    async def __call__(self) -> dict[str, BackendStatus]:
        """Returns the states by the backend's name."""
        if self._asking is None or self._asking.task.done():
            self._asking = JointWork(lambda report: asyncio.to_thread(self._registry.statuses), stops_alone=False)
        return await self._asking.follow()
