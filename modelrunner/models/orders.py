"""The order of a pull, as the daemon's operations take it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from modelrunner.errors import BadRequest
from modelrunner.models.recipes import Recipe
from modelrunner.pull.file import stored_source, with_parts
from modelrunner.pull.uploads import uploaded_source


@dataclass(frozen=True, slots=True)
class PullOrder:
    """The order of a pull: `source` is a reference, or `file:///path` of a file or folder to package. `name` is the
    model's new name, by default its reference. `token` goes to the source and nowhere else. `trust` accepts a model
    with code of its own, which its engine will run. `verify` reads every byte of a model that is here. `mmproj`,
    `chat_template` and the LoRA adapters `lora` are files, written as the source is, that become parts of a model of
    this machine; a colon and a scale may follow an adapter. The public key `verify_key`, in PEM, must have
    signed the model, which goes to `folder`, one of the store's. `adapters` are LoRA adapters that were sent before:
    the names and digests of their files. With a `recipe`, `adapters` or further files, a source that is no file is a
    model that the new one is made of: it is pulled if it is not here. `is_sent` marks the
    source of `of_files`."""

    source: str
    name: str | None = None
    token: str | None = None
    trust: bool = False
    verify: bool = False
    mmproj: str | None = None
    chat_template: str | None = None
    lora: Sequence[str] = ()
    verify_key: str | None = None
    folder: Path | None = None
    recipe: Recipe = field(default_factory=Recipe)
    adapters: Mapping[str, str] = field(default_factory=dict)
    is_sent: bool = False

    @classmethod
    def of_files(cls, files: Mapping[str, str], name: str, recipe: Recipe) -> Self:
        """Makes the order of files that were sent before; `files` maps their names to their digests."""
        return cls(uploaded_source(files), name, recipe=recipe, is_sent=True)

    @property
    def has_parts(self) -> bool:
        """Returns whether files of this machine become parts of the model."""
        return bool(self._parts)

    def text(self, base: str | None = None) -> str:
        """Returns the source, or the model `base` that is here, and the further files, as `Puller.pull` takes them.
        Raises `BadRequest`."""
        if not self.source.strip():
            raise BadRequest("from names no model", param="from")
        if base is not None and self.adapters:
            return uploaded_source(self.adapters, base)
        return with_parts(self.source if base is None else stored_source(base), self._parts)

    @property
    def _parts(self) -> list[tuple[str, str]]:
        given = {"mmproj": self.mmproj, "chat-template": self.chat_template}
        single = [(name, source) for name, source in given.items() if source is not None]
        return [*single, *(("lora", adapter) for adapter in self.lora)]
