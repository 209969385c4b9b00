"""The defaults that a model carries for requests that leave them out: a system prompt, messages, sampling options,
arguments of its chat template and a context size. They are a part of the model's published configuration, under the key
`defaults`."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec

from modelrunner.errors import BadRequest
from modelrunner.schema import whole_number, wrong_field

_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "repeat_last_n", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta"),
)
_OTHER_NAMES = {
    "repeat_penalty": ("repeat_penalty", "repetition_penalty"),  # vLLM's name is the second
    "num_keep": ("n_keep",),
    "num_predict": ("max_tokens",),
}
_FIRST, _LAST = -(1 << 63), (1 << 63) - 1
_Text = Annotated[str, msgspec.Meta(max_length=1 << 17)]
MOST_MESSAGES = 256
TemplateArguments = Annotated[
    dict[
        Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_]\w{0,127}$")],
        bool | int | float | Annotated[str, msgspec.Meta(max_length=4096)],
    ],
    msgspec.Meta(max_length=64),
]
"""Variables of a chat template, such as `enable_thinking`, with their values."""
# Options of Ollama for a load, which are never variables of a template.
_OF_THE_MACHINE = frozenset(
    (
        *("num_gpu", "main_gpu", "num_thread", "num_batch", "num_gqa", "use_mmap", "use_mlock", "numa", "low_vram"),
        *("f16_kv", "vocab_only", "logits_all", "draft_num_predict"),
    )
)


class SamplingOptions(msgspec.Struct, gc=False, omit_defaults=True):
    """Sampling options under Ollama's names
    (https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx#valid-parameters-and-values). The model's
    configuration sets the options of a load (`num_gpu`, `num_thread`, ...) here."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    num_predict: int | None = None
    num_keep: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, param: str) -> "SamplingOptions":
        """Reads options. Unknown ones are left out, 40.0 is 40, null is absent. Raises `BadRequest` for one of a wrong
        type or size; `param` is the field that holds them."""
        known = {name: whole_number(value) for name, value in (options or {}).items()}
        for name, value in known.items():
            if isinstance(value, (int, float)) and not _FIRST <= value <= _LAST:  # nan is in no order
                raise BadRequest(f"{param}.{name} is not a number of 64 bits", param=f"{param}.{name}")
        try:
            return msgspec.convert(known, cls)
        except msgspec.ValidationError as error:
            wrong = wrong_field(error)
            name = f"{param}.{wrong.param}" if wrong.param else param
            raise BadRequest(f"{param}.{wrong.message}", param=name) from None

    @staticmethod
    def names(option: str) -> tuple[str, ...]:
        """Returns the names by which `mapped` sends an option."""
        return _OTHER_NAMES.get(option, (option,))

    def mapped(self) -> dict[str, Any]:
        """Returns the options under the names of llama.cpp and vLLM. A negative `num_predict` sets no limit."""
        fields = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.repeat_penalty is not None:
            fields["repetition_penalty"] = self.repeat_penalty  # vLLM's name
        if self.num_keep is not None:
            fields["n_keep"] = self.num_keep
        if self.num_predict is not None and self.num_predict >= 0:
            fields["max_tokens"] = self.num_predict
        return fields


class DefaultMessage(msgspec.Struct, frozen=True):
    """A message that every conversation begins with."""

    role: Literal["system", "user", "assistant"]
    content: _Text


class ModelDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """`context_size` is in tokens of one sequence."""

    system: _Text | None = None
    messages: Annotated[tuple[DefaultMessage, ...], msgspec.Meta(max_length=MOST_MESSAGES)] = ()
    parameters: Mapping[str, Any] = {}
    context_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    template_arguments: TemplateArguments = {}

    @classmethod
    def parse(cls, value: Any) -> "ModelDefaults | None":
        """Reads decoded JSON; returns None if it has no default that applies. Raises `msgspec.ValidationError`."""
        defaults = msgspec.convert(value, cls)
        msgspec.convert(defaults.parameters, SamplingOptions)
        return defaults if defaults != NO_DEFAULTS else None

    @property
    def sampling(self) -> SamplingOptions:
        return msgspec.convert(self.parameters, SamplingOptions)

    def over(self, under: "ModelDefaults | None") -> "ModelDefaults":
        """Returns these defaults, and those of `under` for values that are missing here; the parameters and the
        arguments are merged one by one."""
        if under is None:
            return self
        return ModelDefaults(
            under.system if self.system is None else self.system,
            self.messages or under.messages,
            {**under.parameters, **self.parameters},
            self.context_size or under.context_size,
            {**under.template_arguments, **self.template_arguments},
        )


NO_DEFAULTS = ModelDefaults()
_Field = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class RequestParameters(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Fields of each request of a model, in the names of its engine: those that are removed, and those that it always
    has, whatever the client sends."""

    strip: Annotated[tuple[_Field, ...], msgspec.Meta(max_length=64)] = ()
    set: Annotated[dict[_Field, Any], msgspec.Meta(max_length=64)] = {}


def split_parameters(parameters: Mapping[str, Any], variables: Collection[str] | None = ()) -> dict[str, Any]:
    """Returns the fields of `ModelDefaults` that a model's parameters give: sampling options, the context size
    (`num_ctx`), and arguments of the chat template, which has these `variables`; None if they are unknown. Raises
    `BadRequest` for a parameter that no model carries."""
    known = (*SamplingOptions.__struct_fields__, "num_ctx")
    arguments = {name: value for name, value in parameters.items() if name not in known}
    for name in arguments:
        if name in _OF_THE_MACHINE or (variables is not None and name not in variables):
            raise BadRequest(
                f"a model cannot carry the parameter {name[:40]!r}, only {', '.join(known)} and the variables of its "
                "chat template; settings of this machine are set with `modelrunner configure`",
                param=f"parameters.{name}",
            )
    context = whole_number(parameters.get("num_ctx"))
    if context is not None and (type(context) is not int or context < 1):
        raise BadRequest(f"parameters.num_ctx must be a number of tokens, not {context!r}", param="parameters.num_ctx")
    options = {name: value for name, value in parameters.items() if name in SamplingOptions.__struct_fields__}
    sampling = msgspec.to_builtins(SamplingOptions.of(options, "parameters"))
    return {"parameters": sampling, "context_size": context, "template_arguments": arguments}
