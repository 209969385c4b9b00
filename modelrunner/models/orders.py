"""The order of a pull, as the daemon's operations take it, and the recipe of a model that is made here: the defaults
that a user gives it, and their merge with the model's own defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from modelrunner import chattemplates
from modelrunner.defaults import ModelDefaults, split_parameters
from modelrunner.errors import BadRequest
from modelrunner.modelfile import check_template
from modelrunner.pull.file import stored_source, with_parts
from modelrunner.pull.source import Making
from modelrunner.pull.uploads import uploaded_source
from modelrunner.schema import wrong_field
from modelrunner.store.details import ModelDetails

_MOST_LICENCES = 32
_LARGEST_LICENCE = 1 << 20  # characters


@dataclass(frozen=True, slots=True)
class Recipe:
    """`template` is the text of a chat template; `parameters` are Ollama's options, `num_ctx` among them; `messages`
    are role and content. A field that is None or empty keeps the base model's value; a system prompt of "" removes the
    base model's."""

    system: str | None = None
    template: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[tuple[str, str]] = ()
    licences: Sequence[str] = ()
    context_size: int | None = None

    def __bool__(self) -> bool:
        return self != _EMPTY

    def making(self, base: ModelDetails | None) -> Making:
        """Returns the defaults of a model that is made of `base` by this recipe. Raises `BadRequest`."""
        parameters, context = split_parameters(self.parameters)
        messages = [{"role": role, "content": content} for role, content in self.messages]
        given = {"system": self.system, "messages": messages, "parameters": parameters}
        try:
            found = msgspec.convert(given | {"context_size": self.context_size or context}, ModelDefaults)
        except msgspec.ValidationError as error:
            raise wrong_field(error) from None
        defaults = found.over(base.defaults if base else None)
        if defaults.system == "":
            defaults = msgspec.structs.replace(defaults, system=None)
        if self.template is not None:
            if not self.template or len(self.template.encode()) > chattemplates.LARGEST:
                raise BadRequest(f"a chat template has 1 to {chattemplates.LARGEST} bytes", param="template")
            check_template(self.template)
        licences = tuple(dict.fromkeys((*(base.licences if base else ()), *self.licences)))
        if len(licences) > _MOST_LICENCES or any(len(each) > _LARGEST_LICENCE for each in licences):
            raise BadRequest(f"a model has at most {_MOST_LICENCES} licences of {_LARGEST_LICENCE} characters each")
        return Making(ModelDefaults.parse(msgspec.to_builtins(defaults)), self.template, licences)


_EMPTY = Recipe()


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
