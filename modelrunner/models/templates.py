"""Chat templates that a configuration gives to models: kept as text in the configuration, and as files for engines."""

import hashlib
from dataclasses import replace
from pathlib import Path

from modelrunner import chattemplates, durable
from modelrunner.durable import translated
from modelrunner.store.names import TEMPLATE
from modelrunner.types import Bundle

_FROM_TEMPLATE = frozenset({"chat", "tools", "reasoning"})


class TemplateFiles:
    """A folder of templates, each named by the hash of its content. What lies there can be made again at any time."""

    def __init__(self, folder: Path) -> None:
        """`folder` need not exist. What an earlier daemon left there is removed."""
        self._folder = folder
        with translated("removing old chat templates", folder.parent):
            durable.discard(folder)

    def applied(self, bundle: Bundle, template: str) -> Bundle:
        """The bundle with `template` in place of its own. Writes the file if it is not there. Raises
        `InsufficientDisk`, `StorageFailed`."""
        data = template.encode()
        file = self._folder / f"{hashlib.sha256(data).hexdigest()}.jinja"
        if not file.is_file():
            with translated("writing the chat template", self._folder.parent):
                durable.make_folder(self._folder, synced=False)
                durable.write(file, data, synced=False)
        own = bundle.capabilities - _FROM_TEMPLATE
        found = chattemplates.abilities(template) if "completion" in own else frozenset()
        return replace(bundle, files={**bundle.files, TEMPLATE: file}, capabilities=own | found)
