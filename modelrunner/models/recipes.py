"""Recipes: the defaults that a user gives a model, and their merge with the model's own defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from modelrunner import chattemplates
from modelrunner.defaults import ModelDefaults, split_parameters
from modelrunner.errors import BadRequest
from modelrunner.modelfile import check_template
from modelrunner.pull.source import Making
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
