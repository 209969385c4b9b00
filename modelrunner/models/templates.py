"""Chat templates from the configuration of models. The configuration holds their text, and engines read them from
files."""

import hashlib
from dataclasses import replace
from pathlib import Path

from modelrunner import durable
from modelrunner.durable import translated
from modelrunner.models.rendering import Renderings
from modelrunner.store.names import TEMPLATE
from modelrunner.types import Bundle

_FROM_TEMPLATE = frozenset({"chat", "tools", "reasoning"})


class TemplateFiles:
    """A folder of templates. The hash of a template's content is its file name. The files can be made again at any
    time."""

    def __init__(self, folder: Path, renderings: Renderings) -> None:
        """`folder` need not exist. The files of an earlier daemon are removed."""
        self._folder = folder
        self.renderings = renderings
        with translated("removing old chat templates", folder.parent):
            durable.discard(folder)

    def applied(self, bundle: Bundle, template: str) -> Bundle:
        """Returns the bundle with `template` in place of its own. Writes the file if it is not there. Raises
        `BadRequest` for one that no engine can use, `InsufficientDisk`, `StorageFailed`."""
        self.renderings.require(template)
        data = template.encode()
        file = self._folder / f"{hashlib.sha256(data).hexdigest()}.jinja"
        if not file.is_file():
            with translated("writing the chat template", self._folder.parent):
                durable.make_folder(self._folder, synced=False)
                durable.write(file, data, synced=False)
        own = bundle.capabilities - _FROM_TEMPLATE
        found = self.renderings.abilities(template) if "completion" in own else frozenset()
        return replace(bundle, files={**bundle.files, TEMPLATE: file}, capabilities=own | found)
