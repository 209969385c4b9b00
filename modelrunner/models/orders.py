"""The order of a pull, as the daemon's operations take it, and the recipe of a model that is made here: the defaults
that a user gives it, and their merge with the model's own defaults."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from modelrunner import chattemplates, lora
from modelrunner.defaults import ModelDefaults, split_parameters
from modelrunner.errors import BadRequest
from modelrunner.modelfile import check_template
from modelrunner.pull.file import Extras, LocalFiles, is_file, path_of
from modelrunner.pull.source import Making
from modelrunner.schema import wrong_field
from modelrunner.store.details import ModelDetails

_MOST_LICENCES = 32
_LARGEST_LICENCE = 1 << 20  # characters


@dataclass(frozen=True, slots=True)
class Recipe:
    """`template` is the text of a chat template; `parameters` are Ollama's options, `num_ctx` among them, and arguments
    of the template; `messages` are role and content. A field that is None or empty keeps the base model's value; a
    system prompt of "" removes the base model's."""

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
        template = self.template or (base.template if base else "")
        known = split_parameters(self.parameters, chattemplates.variables(template) if template else None)
        messages = [{"role": role, "content": content} for role, content in self.messages]
        fields = {"system": self.system, "messages": messages, **known}
        try:
            changed = msgspec.convert(
                fields | {"context_size": self.context_size or known["context_size"]}, ModelDefaults
            )
        except msgspec.ValidationError as error:
            raise wrong_field(error) from None
        defaults = changed.over(base.defaults if base else None)
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
    """The order of a pull: `source` is a reference, `file:///path` of a file or folder to package, or files of this
    machine. `name` is the model's new name, by default its reference. `token` goes to the source and nowhere else.
    `trust` accepts a model with code of its own, which its engine will run. `verify` reads every byte of a model that
    is here. `extras` become parts of the model. The public key `verify_key`, in PEM, must have signed the model, which
    goes to `folder`, one of the store's. `files` that were sent before, by their names the digests, take the place of
    the source; `adapters` are LoRA adapters that were sent before. With a `recipe`, `adapters` or `extras`, a source
    that is no file is a model that the new one is made of: it is pulled if it is not here."""

    source: str | LocalFiles
    name: str | None = None
    token: str | None = None
    trust: bool = False
    verify: bool = False
    extras: Extras = Extras()  # noqa: RUF009  # it is immutable
    verify_key: str | None = None
    folder: Path | None = None
    recipe: Recipe = field(default_factory=Recipe)
    files: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str | None:
        """Returns the name of the model that is pulled, or that the new one is made of; None if it is made of files."""
        return None if self.files or isinstance(self.source, LocalFiles) or is_file(self.source) else self.source

    @property
    def is_local(self) -> bool:
        """Returns whether the order reads files of this machine that were not sent."""
        return self.extras != Extras() or (self.model is None and not self.files)

    @property
    def derives(self) -> bool:
        """Returns whether the order makes a model from another one."""
        return self.model is not None and bool(self.extras != Extras() or self.recipe or self.adapters)

    def __str__(self) -> str:
        return "files that were sent" if self.files else str(self.source)


def parse_extras(mmproj: str | None = None, chat_template: str | None = None, loras: Iterable[str] = ()) -> Extras:
    """Takes texts `file:///absolute/path`; a colon and a scale may follow an adapter. Raises `BadRequest`."""
    split = [lora.split(text) for text in loras]
    return Extras(
        None if mmproj is None else path_of(mmproj, "mmproj"),
        None if chat_template is None else path_of(chat_template, "chat-template"),
        tuple([lora.LoraPath(path_of(place, "lora"), scale) for place, scale in split]),
    )
