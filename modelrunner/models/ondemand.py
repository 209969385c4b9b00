"""Installs a missing engine for the first request that needs it, if the backend allows that."""

from modelrunner.models.installs import Installer
from modelrunner.models.resolve import BeingInstalled, EngineMissing, Resolver
from modelrunner.progress import ProgressReport, WorkProgress
from modelrunner.scheduler import Target
from modelrunner.types import Mode


class InstallOnDemand:
    """Resolves the models of requests as `Resolver` does. `stage` is the step that unresolved requests wait
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
