"""The structs about models on disk: the list, pulls, names, space, and whether a model would fit."""

from typing import Annotated, Any, Literal

import msgspec

from modelrunner.wire.runners import Memory


class AppliedAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter. `size` is in bytes."""

    name: str
    scale: float
    size: int


class Origin(msgspec.Struct, frozen=True):
    """The source of a model's name; `version` is a commit, a digest or a version."""

    name: str
    source: str = msgspec.field(name="from")
    version: str


class Update(msgspec.Struct, frozen=True):
    """An entry of `GET /updates`: whether the source of a model has a newer one; None if it is unknown, and `reason`
    says why."""

    name: str
    source: str = msgspec.field(name="from")
    newer: bool | None
    reason: str


class Offer(msgspec.Struct, frozen=True):
    """`GET /models/search`: a model that a hub offers. A pull of `name` takes the first of its `quantizations`, one of
    `name:QUANTIZATION` another one."""

    name: str
    downloads: int
    likes: int
    task: str
    gated: bool
    quantizations: list[str] = []


class CheckOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /models/REF/check`: how many conversations of `modelrunner check` the model passed, and the
    names of those that it failed."""

    passed: Annotated[int, msgspec.Meta(ge=0, le=1000)]
    failed: Annotated[list[Annotated[str, msgspec.Meta(min_length=1, max_length=100)]], msgspec.Meta(max_length=100)]


class ModelCheck(msgspec.Struct, frozen=True):
    """The last check of a model with its present files, settings and engine: how many conversations it passed, and the
    names of those that it failed. `time` is in Unix seconds; `engine` is the name and the version of its engine."""

    passed: int
    failed: list[str]
    time: int
    engine: str


class Model(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of `GET /models`. `created` is in Unix seconds; `config` is an object with format, quantization,
    parameters, architecture, size (as text), context_size (the size that it was trained for), and the header's metadata
    under `gguf` or `safetensors`. `capabilities` are chat, completion, embedding, reranking, classification, tools,
    vision, audio, reasoning; `context_window` is the most tokens of one request at present; `adapters` are the applied
    LoRA adapters; `aliases` are the names of the configuration for which it answers. `damage` says why the model cannot
    be used; its `config` is then empty. `check` is None for a model that was not checked as it is now."""

    id: str
    tags: list[str]
    created: int
    config: Any
    damage: str = ""
    capabilities: list[str] = []
    context_window: int | None = None
    adapters: list[AppliedAdapter] = []
    origins: list[Origin] = []
    aliases: list[str] = []
    check: ModelCheck | None = None

    @property
    def name(self) -> str:
        """Returns the first name of the model, or its ID if it has none."""
        return self.tags[0] if self.tags else self.id


_PULL_NAMES = {"from_": "from", "bearer_token": "bearer-token", "trust_remote_code": "trust-remote-code"}
_PULL_NAMES |= {"chat_template": "chat-template", "verify_key": "verify-key", "context_size": "context-size"}


class CarriedMessage(msgspec.Struct, frozen=True):
    """`role` is system, user or assistant."""

    role: str
    content: str


class PullRequest(msgspec.Struct, frozen=True, rename=_PULL_NAMES, forbid_unknown_fields=True, omit_defaults=True):
    """The body of `POST /models/create`. `trust_remote_code` accepts a model that carries code, which its engine will
    run; `verify` reads every byte of a model that is here already. `mmproj`, `chat_template` and the LoRA adapters
    `lora` are files to package with a model of this machine: `file:///path`, and for an adapter also
    `file:///path:SCALE`. `verify_key` is a public key in PEM that must have signed the model. `folder` is the one of
    `model_dirs` in which the model is stored. The fields from `system` on are carried by the new model, and replace
    those of the model `from`; `template` is the text of a chat template in Jinja, `parameters` are Ollama's options. A
    pull in the `background` goes on without its client."""

    from_: str
    bearer_token: str | None = None
    name: str | None = None
    trust_remote_code: bool = False
    verify: bool = False
    mmproj: str | None = None
    chat_template: str | None = None
    lora: list[str] = []
    verify_key: str | None = None
    folder: str | None = None
    system: str | None = None
    template: str | None = None
    parameters: dict[str, Any] = {}
    messages: list[CarriedMessage] = []
    license: list[str] = []
    context_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    background: bool = False


class RepackageRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /models/REF/repackage`. `target` is the new model's name; `context_size` is in tokens."""

    target: str
    context_size: Annotated[int, msgspec.Meta(ge=1)] | None = None


class QuantizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /models/REF/quantize`. `target` is the new model's name, `type` a quantization such as Q4_K_M;
    `requantize` accepts a model that is quantized already."""

    target: str
    type: str
    requantize: bool = False


class MoveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /models/REF/move`. `folder` is one of the folders of models."""

    folder: str


class Repackaged(msgspec.Struct, frozen=True):
    message: str
    source: str
    target: str


class ModelShown(msgspec.Struct, frozen=True):
    """The answer of `GET /models/REF/show`. `template` is the chat template in Jinja and `template_digest` its sha256,
    "" without one; the licences are texts. The fields from `system` on are the model's defaults for requests that leave
    them out; `parameters` are Ollama's options. `modelfile` is a text that `modelrunner create -f` takes. With
    `remote=true` the model is at its source: `version` is its commit, branch or digest there, and `files` are the sizes
    (bytes) by the names there; values that a source gives only with a download are left out of `config`.
    `template_problem` says what its chat template cannot do, "" if nothing is known of that kind."""

    id: str
    tags: list[str]
    config: Any
    template: str
    template_digest: str
    license: list[str]
    system: str | None
    messages: list[CarriedMessage]
    parameters: dict[str, Any]
    context_size: int | None
    modelfile: str
    version: str = ""
    files: dict[str, int] = {}
    template_problem: str = ""


class Importable(msgspec.Struct, frozen=True):
    """An entry of `GET /models/import`: a model of another program at `path`. `size` is in bytes; `cost` is reflink,
    hard link or copy; `here` is true if a model has that name already."""

    name: str
    program: str
    size: int
    cost: str
    path: str
    here: bool


class ImportRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /models/import`. `model` is a name of `GET /models/import`, or a unique part of one; `name` is
    the model's new name, by default the same."""

    model: str
    name: str | None = None


class PushRequest(msgspec.Struct, frozen=True, rename={"bearer_token": "bearer-token"}, forbid_unknown_fields=True):
    """The body of `POST /models/{ref}/push`. `to` is the name at the registry, by default the model's own; `sign` is
    the absolute path of a private key on the daemon's machine."""

    to: str | None = None
    bearer_token: str | None = None
    sign: str | None = None


class Layer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of one file of a pull, in bytes. `id` is its digest, or its name while the digest is unknown; `rate`
    is in bytes per second, `remaining` in seconds, None while it is unknown."""

    id: str
    size: int
    current: int
    rate: float = 0.0
    remaining: float | None = None


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of NDJSON of a pull, an installation or another long piece of work. `total` in bytes, `rate` in bytes
    per second, `remaining` in seconds, None while it is unknown; the last line is of type success or error. An error
    carries the `error` object of every other route."""

    type: Literal["progress", "success", "warning", "error"]
    message: str
    total: int = 0
    current: int = 0
    layer: Layer | None = None
    mode: str = ""
    phase: str = ""
    rate: float = 0.0
    remaining: float | None = None
    error: dict[str, Any] | None = None
    model: str | None = None


class PullBegun(msgspec.Struct, frozen=True):
    """The answer to a pull in the background: the model that was asked for."""

    model: str


class PullStatus(msgspec.Struct, frozen=True):
    """`GET /pulls`: a pull under way. `model` is the name that it gives, `started` in Unix seconds."""

    model: str
    source: str = msgspec.field(name="from")
    started: int
    progress: Progress


class PrunedItem(msgspec.Struct, frozen=True):
    """`kind` is "model", "unfinished download", "file of no model" or "damaged file set aside"; `size` in bytes."""

    kind: str
    name: str
    size: int


class PruneResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of `POST /models/prune` and `/engines/prune`, in bytes; with `dry_run` nothing was removed."""

    freed: int
    removed: list[PrunedItem] = []
    dry_run: bool = False


class Disk(msgspec.Struct, frozen=True):
    """The disk space that a model needs, in bytes; `needed` is 0 for a model that is here."""

    needed: int
    free: int


class Fit(msgspec.Struct, frozen=True):
    """The answer of `GET /models/REF/fit`. `fits` is now, after_eviction, split or never."""

    fits: str
    needed: Memory | None
    free: Memory
    budget: Memory
    would_evict: list[str]
    reason: str
    disk: Disk | None = None


class ModelUsage(msgspec.Struct, frozen=True):
    """The disk usage of a model, in bytes; `shared` is the part that other models of its `folder` use too. `last_used`
    is in Unix seconds: the time of the pull for a model that was never used."""

    id: str
    tags: list[str]
    size: int
    shared: int
    reclaimable: int
    last_used: int = 0
    folder: str = ""


class FolderUsage(msgspec.Struct, frozen=True):
    """A folder of models, in bytes: its files, shared ones counted once, unfinished downloads, and the free space of
    its disk. `absent` says why it cannot be used now, "" if it can."""

    path: str
    size: int = 0
    partial: int = 0
    free: int = 0
    absent: str = ""


class BackendUsage(msgspec.Struct, frozen=True):
    """Sizes in bytes; `state` is the backend's saved conversations."""

    name: str
    version: str
    size: int
    state: int = 0


class DiskUsage(msgspec.Struct, frozen=True):
    """The answer of `GET /engines/df`, in bytes. The totals count files that models of one folder share once."""

    models: list[ModelUsage]
    backends: list[BackendUsage]
    models_disk_usage: int
    default_backend_disk_usage: int
    partial: int
    folders: list[FolderUsage] = []


class Removal(msgspec.Struct, frozen=True, omit_defaults=True, rename="pascal"):
    """One step of `DELETE /models/REF`: a name that was taken away, or a model that was deleted."""

    untagged: str = ""
    deleted: str = ""


class Tagged(msgspec.Struct, frozen=True):
    """`POST /models/REF/tag`: `target` is the new name."""

    message: str
    target: str
