"""The settings of one model: the one list of fields behind `_configure`, the `[models."REF"]` tables of the
configuration file and `modelrunner configure`."""

import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from modelrunner import chattemplates, lora
from modelrunner.defaults import RequestParameters, TemplateArguments
from modelrunner.errors import BadRequest
from modelrunner.schema import nearest, wrong_field
from modelrunner.types import Hours, KeepAlive

MAX_PARALLEL = 256
Count = Annotated[int, msgspec.Meta(ge=1)]
HostName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TRAINED = -1  # the context size that the model was trained for
# Fields that only the daemon uses: a change of them never needs another process.
_NOT_THE_ENGINES = dict.fromkeys(
    (
        *("keep_alive", "pin", "preload", "max_tokens", "max_seconds", "recording", "replicas", "parameters"),
        *("fallback", "template_arguments", "hours", "hosts"),
    )
)
_OURS = frozenset(("model", "stream", "stream_options", "messages", "prompt", "input", "query", "documents", "texts"))
"""The fields of a request by which the daemon knows what it is about."""
_RAW_FLAGS = "raw-runtime-flags"  # one text of shell words, kept as runtime-flags


class Speculative(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Speculative decoding: up to `num_tokens` tokens are proposed, and the model itself checks them all at once. A
    small model, or a head that was trained for the model, proposes them, as long as each has at least the probability
    `min_acceptance_rate`; or with `ngram`, they are those that followed the same words earlier in the conversation; or
    with `mtp`, the model's own heads predict them."""

    draft_model: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    ngram: bool = False
    mtp: bool = False
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    min_acceptance_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None


ReplicaCount = Annotated[int, msgspec.Meta(ge=1, le=64)]


class ReplicaRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model has `min` runners where there is room, and gets up to `max` while their places are taken."""

    min: ReplicaCount = 1
    max: ReplicaCount = 1


class ModelConfiguration(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    rename=lambda name: name if name == "keep_alive" else name.replace("_", "-"),
):
    """The settings of one model; None means not set. Context sizes are in tokens of one sequence; `TRAINED` is the
    size that the model was trained for; `gpu_layers` is how many layers go to devices; `keep_alive` is a Go duration
    or "-1"; outside of `hours`, a text of `Hours`, neither `pin` nor `preload` holds; a number of `replicas` is both
    ends of the range; `max_tokens` and `max_seconds` are the limits of one request. `chat_template` is the text of a
    Jinja template, `lora` are LoRA adapters of this machine as `PATH[:SCALE]` (`modelrunner.lora`), in place of those
    that were packaged with the model. `fallback` is the model that answers where there is no memory for this one.
    `hosts` are the names, or labels as NAME=VALUE, of the only hosts that may run it, "here" for the daemon's machine.
    "auto" of `speculative` and `tune` stands for what was measured on this machine. `options` are the backends' own
    tables by `table_name`, checked by their `options_model`."""

    backend: str | None = None
    context_size: Annotated[int, msgspec.Meta(ge=TRAINED)] | None = None
    min_context_size: Count | None = None
    parallel: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARALLEL)] | None = None
    gpu_layers: Annotated[int, msgspec.Meta(ge=0, le=10_000)] | None = None
    keep_alive: str | None = None
    runtime_flags: tuple[str, ...] | None = None
    pin: bool | None = None
    preload: bool | None = None
    hours: str | None = None
    replicas: ReplicaCount | ReplicaRange | None = None
    max_tokens: Count | None = None
    max_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    recording: bool | None = None
    speculative: Speculative | Literal["auto"] | None = None
    tune: Literal["auto"] | None = None
    chat_template: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    lora: tuple[str, ...] | None = None
    parameters: RequestParameters | None = None
    template_arguments: TemplateArguments | None = None
    fallback: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] | None = None
    hosts: Annotated[tuple[HostName, ...], msgspec.Meta(min_length=1, max_length=1000)] | None = None
    options: dict[str, dict[str, Any]] = {}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "ModelConfiguration":
        """Reads the names of the wire and of the configuration file. Raises `BadRequest` whose `param` is the path of
        the field. A table of an unknown name is taken for a backend's: `unknown` checks those."""
        values = dict(with_raw_flags(fields))
        values["options"] = {name: values.pop(name) for name in tuple(values) if name not in FIELDS}
        for name, value in values["options"].items():
            if not isinstance(value, Mapping):
                wrong = unknown(name)
                raise wrong.saying(f"{wrong.message}; a backend's own settings are a table")
        if values.get("keep_alive") is not None:
            values["keep_alive"] = str(KeepAlive.parse(values["keep_alive"]))
        try:
            configuration = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise wrong_field(
                error, (*FIELDS, *Speculative.__struct_encode_fields__, "min", "max", "strip", "set")
            ) from None
        return configuration.checked()

    def checked(self) -> "ModelConfiguration":
        """Returns itself. Raises `BadRequest` for values that contradict each other."""
        least, wanted = self.min_context_size, self.context_size
        if wanted == 0:
            raise BadRequest(
                "context-size must be a number of tokens above 0, or -1 for the size that the model was trained for",
                param="context-size",
            )
        if least is not None and wanted not in (None, TRAINED) and least > wanted:
            raise BadRequest(
                f"min-context-size {least} is more than the context-size {wanted}", param="min-context-size"
            )
        if self.replica_range.min > self.replica_range.max:
            raise BadRequest("replicas.min is more than replicas.max", param="replicas.min")
        if (size := len((self.chat_template or "").encode("utf-8", "replace"))) > chattemplates.LARGEST:
            raise BadRequest(
                f"the chat template has {size} bytes; the largest allowed is {chattemplates.LARGEST}",
                param="chat-template",
            )
        drafts = self.drafting
        if drafts is not None and (drafts.draft_model is not None) + drafts.ngram + drafts.mtp != 1:
            raise BadRequest(
                "speculative decoding takes one of draft_model, ngram: true and mtp: true; the last two need no second "
                "model",
                param="speculative.draft_model",
            )
        lora.parse(self.lora or ())
        if self.hours is not None:
            Hours.parse(self.hours)
        for kind, names in (("strip", self.parameters.strip), ("set", self.parameters.set)) if self.parameters else ():
            if ours := sorted(_OURS.intersection(names)):
                raise BadRequest(
                    f"parameters.{kind} cannot have {ours[0]}: the daemon needs it as the client wrote it",
                    param=f"parameters.{kind}",
                )
        return self

    @property
    def drafting(self) -> Speculative | None:
        """The speculative decoding that was chosen, not measured."""
        return self.speculative if isinstance(self.speculative, Speculative) else None

    @property
    def tunes(self) -> bool:
        """True if the daemon measures what is faster."""
        return "auto" in (self.speculative, self.tune)

    @property
    def replica_range(self) -> ReplicaRange:
        replicas = self.replicas or 1
        return ReplicaRange(replicas, replicas) if isinstance(replicas, int) else replicas

    def merged(self, patch: Mapping[str, Any], tables: Collection[str] = ()) -> "ModelConfiguration":
        """Applies a JSON merge patch (RFC 7396) in the names of the wire: a field that is left out keeps its value,
        null resets it, tables are merged key by key. `tables` are those of the known backends, which null may reset
        where they are not set. Raises `BadRequest` as `of` does."""
        before = self.as_dict()
        known = {*FIELDS, *before, *tables, _RAW_FLAGS}
        for name, value in patch.items():
            if value is None and name not in known:
                raise unknown(name)
        return self.of(_merge(before, with_raw_flags(patch)))

    def over(self, under: "ModelConfiguration") -> "ModelConfiguration":
        """Returns the settings of this configuration, and those of `under` for fields that are not set here."""
        if NOTHING_SET in (self, under):
            return under if self == NOTHING_SET else self
        fields = self.as_dict()
        if self.drafting is not None:  # it drafts in one way, whichever `under` has
            fields["speculative"] = {"draft_model": None, "ngram": None, "mtp": None} | fields["speculative"]
        return under.merged(fields)

    def as_dict(self) -> dict[str, Any]:
        """Returns the set fields in the names of the wire, with the backends' tables beside them."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        if tables := fields.pop("options", None):
            fields |= {name: table for name, table in tables.items() if table}
        return fields

    def holds(self, minute: int) -> bool:
        """Returns True if `pin` and `preload` hold in this minute of the day, 0 to 1439."""
        return self.hours is None or Hours.parse(self.hours).hold(minute)

    def for_the_engine(self) -> "ModelConfiguration":
        """Returns the settings that an engine is started with: configurations that differ in them need two
        processes."""
        return msgspec.structs.replace(self, **_NOT_THE_ENGINES)


MEANINGS = {
    "backend": "The inference engine.",
    "context-size": "Tokens of one sequence, prompt and answer; -1 for the size that the model was trained for.",
    "min-context-size": "Take less context where memory is short, down to this.",
    "parallel": "Sequences that the engine processes at once, each with a context of its own.",
    "gpu-layers": "Layers that go to GPUs; by default as many as fit.",
    "keep_alive": "How long it stays loaded unused: 5m, 0, or -1 as long as there is room.",
    "runtime-flags": "Flags of the engine.",
    "pin": "Never evict it for another model.",
    "preload": "Load it when the daemon starts.",
    "hours": "The hours of the day in which pin and preload hold: HH:MM-HH:MM.",
    "replicas": "Runners at once: a number, or MIN-MAX for more only while the others are busy.",
    "max-tokens": "The most tokens that one request may generate.",
    "max-seconds": "The most seconds that the engine may work on one request.",
    "recording": "Keep the last requests with their bodies in memory.",
    "speculative": "A small model, what the conversation repeats, or heads of the model propose tokens; the model "
    "checks them. auto: where it was measured to pay.",
    "tune": "auto: start the engine with the flags that were measured to be faster.",
    "chat-template": "A chat template in Jinja, instead of the model's own; for tools, or roles.",
    "lora": "LoRA adapters on the daemon's machine, as PATH or PATH:SCALE.",
    "parameters": "Fields of each request: `strip` removes some, `set` gives some their values.",
    "template-arguments": "Variables of the chat template for requests that leave them out, such as enable_thinking.",
    "fallback": "The model that answers where there is no memory for this one.",
    "hosts": "The only hosts that may run it: names, labels as NAME=VALUE, or `here`.",
}
FIELDS = frozenset(ModelConfiguration.__struct_encode_fields__) - {"options"}
NOTHING_SET = ModelConfiguration()


def schema(backends: Iterable[str], tables: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the JSON schema (2020-12) of a model's settings, in the names of the wire. `backends` are the engines to
    choose from, `tables` has the schemas of their own tables."""
    defined = msgspec.json.schema(ModelConfiguration)["$defs"]
    schema: dict[str, Any] = defined.pop("ModelConfiguration")
    properties = schema["properties"]
    del properties["options"]
    properties["backend"] = {"anyOf": [{"enum": [*backends]}, {"type": "null"}], "default": None}
    for name, meaning in MEANINGS.items():
        properties[name]["description"] = meaning
    return schema | {"$defs": defined, "properties": {**properties, **tables}}


def table_name(backend: str) -> str:
    """Returns the name of a backend's own table: the backend's name without dots, which TOML would read as a path."""
    return backend.replace(".", "")


def unknown(name: str, known: Iterable[str] = ()) -> BadRequest:
    """Returns the error for a key that is not a setting of a model. `known` are further names that a backend's table
    may have."""
    return BadRequest(f"unknown setting {name!r}{nearest(name, (*FIELDS, _RAW_FLAGS, *known))}", param=name)


def with_raw_flags(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Moves `raw-runtime-flags` into `runtime-flags`. Raises `BadRequest`."""
    if _RAW_FLAGS not in fields:
        return fields
    rest = {name: value for name, value in fields.items() if name != _RAW_FLAGS}
    raw = fields[_RAW_FLAGS]
    if raw is None:
        return {"runtime-flags": None} | rest
    try:
        words = shlex.split(raw) if isinstance(raw, str) else None
    except ValueError as error:
        raise BadRequest(f"{_RAW_FLAGS}: {error}", param=_RAW_FLAGS) from None
    if words is None:
        raise BadRequest(f"{_RAW_FLAGS} must be one text of shell words", param=_RAW_FLAGS)
    flags = rest.get("runtime-flags") or []
    return rest | {"runtime-flags": [*flags, *words]} if isinstance(flags, list) else rest


def _merge(before: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(before)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            under = merged.get(name)
            merged[name] = _merge(under if isinstance(under, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged
