"""The logs of engines: which file belongs to a runner, and to a model."""

from pathlib import Path

from modelrunner.errors import ModelNotFound, RunnerNotFound
from modelrunner.models.library import Library
from modelrunner.scheduler import Scheduler


class EngineLogs:
    """`folder` has the logs. Each revision of a model's configuration writes its own."""

    def __init__(self, library: Library, scheduler: Scheduler, folder: Path) -> None:
        self._library = library
        self._scheduler = scheduler
        self._folder = folder

    def of_runner(self, id: str) -> Path:
        """Raises `RunnerNotFound`, and `ModelNotFound` for a runner that has written nothing yet."""
        for runner in self._scheduler.runners():
            if runner.id == id:
                return self._newest(runner.log_path.name)
        raise RunnerNotFound(f"there is no runner {id}: `modelrunner ps` shows them", param="runner")

    def of_model(self, reference: str) -> Path:
        """Raises `InvalidReference`, `ModelNotFound`, also for a model with which no engine has run."""
        digits = self._library.get(reference).id.removeprefix("sha256:")[:16]
        return self._newest(f"engine-*-{digits}-*.log")

    def _newest(self, pattern: str) -> Path:
        found = max(self._folder.glob(pattern), key=lambda path: path.stat().st_mtime, default=None)
        if found is None:
            raise ModelNotFound("no engine has run with this model, so there is no log", param="model")
        return found
