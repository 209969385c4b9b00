"""The logs of engines that have run on this machine: which file belongs to a model."""

from pathlib import Path

from modelrunner.errors import ModelNotFound
from modelrunner.models.library import Library


class EngineLogs:
    """`folder` has the logs. Each revision of a model's configuration writes its own."""

    def __init__(self, library: Library, folder: Path) -> None:
        self._library = library
        self._folder = folder

    def of_model(self, reference: str) -> Path:
        """Raises `InvalidReference`, `ModelNotFound`, also for a model with which no engine has run."""
        digits = self._library.get(reference).id.removeprefix("sha256:")[:16]
        found = max(self._folder.glob(f"engine-*-{digits}-*.log"), key=lambda path: path.stat().st_mtime, default=None)
        if found is None:
            raise ModelNotFound("no engine has run with this model, so there is no log", param="model")
        return found
