"""The requests and answers of Ollama's routes about models, and the translation of our values to them.

Source of the shapes: https://github.com/ollama/ollama/blob/main/docs/api.md. Times are RFC 3339, sizes in bytes.
"""

import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from modelrunner.api.modelforms import modelfile
from modelrunner.api.streaming import ProgressLines
from modelrunner.defaults import NO_DEFAULTS, ModelDefaults
from modelrunner.errors import BadRequest, ModelRunnerError, NotImplementedHere
from modelrunner.gateway.calls import Dialect
from modelrunner.modelfile import Modelfile, parse, render
from modelrunner.models.abilities import Abilities
from modelrunner.models.making import MakeOrder
from modelrunner.models.orders import Recipe
from modelrunner.scheduler import RunnerView
from modelrunner.store import StoredModel
from modelrunner.store.details import ModelDetails
from modelrunner.wire import CarriedMessage, Progress

API_VERSION = "0.13.5"
"""The version of Ollama whose API this is; clients check it before they use newer features."""
_CENTURY = 100 * 365 * 86400.0  # seconds: Ollama's "for ever"
_CAPABILITIES = {
    "completion": "completion",
    "embedding": "embedding",
    "tools": "tools",
    "vision": "vision",
    "reasoning": "thinking",
}


class OllamaModelRequest(msgspec.Struct, frozen=True):
    """A request about one model. `name` is an older word for `model`."""

    model: str = ""
    name: str = ""
    stream: bool | None = None
    insecure: bool = False

    @property
    def reference(self) -> str:
        """The model. Raises `BadRequest` if the request names none."""
        if not (self.model or self.name):
            raise BadRequest("model names no model", param="model")
        return self.model or self.name


class OllamaCopyRequest(msgspec.Struct, frozen=True):
    source: str
    destination: str


class OllamaCreateRequest(OllamaModelRequest, frozen=True, rename={"from_": "from"}):
    """`files` maps names to digests of blobs."""

    from_: str = ""
    files: Mapping[str, str] | None = None
    adapters: Mapping[str, str] | None = None
    template: str | None = None
    system: str | None = None
    parameters: Mapping[str, Any] | None = None
    messages: Sequence[CarriedMessage] | None = None
    license: str | Sequence[str] | None = None
    quantize: str | None = None
    modelfile: str | None = None

    def order(self) -> MakeOrder:
        """Returns the order of the model. Raises `BadRequest`, and `NotImplementedHere` for a Modelfile with files
        of the client."""
        parsed = parse(self.modelfile) if self.modelfile else Modelfile("")
        if parsed.adapters:
            raise NotImplementedHere(
                "the ADAPTER of a Modelfile is not followed here: send its file first, and name it in `adapters`",
                param="modelfile",
            )
        licences = [self.license] if isinstance(self.license, str) else list(self.license or ())
        recipe = Recipe(
            parsed.system if self.system is None else self.system,
            parsed.template if self.template is None else self.template,
            {**parsed.parameters, **(self.parameters or {})},
            [(message.role, message.content) for message in self.messages or ()] or parsed.messages,
            [*parsed.licences, *licences],
        )
        return MakeOrder(
            self.reference,
            self.from_ or parsed.base,
            files=self.files or {},
            adapters=self.adapters or {},
            quantize=self.quantize or "",
            recipe=recipe,
        )


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `GET /api/tags`."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    capabilities: list[str]


class OllamaList(msgspec.Struct, frozen=True):
    """`GET /api/tags`."""

    models: list[OllamaModel]


class OllamaRunner(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `GET /api/ps`."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunners(msgspec.Struct, frozen=True):
    """`GET /api/ps`."""

    models: list[OllamaRunner]


class OllamaShown(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /api/show`."""

    modelfile: str
    parameters: str
    template: str
    system: str
    messages: list[CarriedMessage]
    license: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, frozen=True):
    version: str


class OllamaProgress(ProgressLines):
    """Lines of `{"status"}`, with a digest and byte counts during a download."""

    content_type: ClassVar[str] = "application/x-ndjson"

    def render(self, line: Progress) -> bytes:
        fields: dict[str, Any] = {"status": line.message}
        if line.type == "success":
            fields = {"status": "success"}
        elif line.layer is not None:
            fields = {"status": f"{line.mode}ing {line.layer.id.removeprefix('sha256:')[:12]}", "digest": line.layer.id}
            fields |= {"total": line.layer.size, "completed": line.layer.current}
        return msgspec.json.encode(fields) + b"\n"

    def failed(self, error: ModelRunnerError, dialect: Dialect, request_id: str) -> bytes:
        return dialect.error_event(error, request_id)


def tagged(name: str) -> str:
    """Returns a model's name with its tag, as Ollama writes names: clients look for `NAME:latest`."""
    return name if ":" in name else f"{name}:latest"


def listed(name: str, model: StoredModel, abilities: Abilities) -> OllamaModel:
    """Returns an entry of `GET /api/tags`."""
    return OllamaModel(
        name=tagged(name),
        model=tagged(name),
        modified_at=_time(model.created),
        size=model.size,
        digest=model.id.partition(":")[2],
        details=_details(model),
        capabilities=capabilities(abilities),
    )


def running(view: RunnerView, model_id: str, name: str, model: StoredModel | None) -> OllamaRunner:
    """Returns an entry of `GET /api/ps`, for one of the runner's models. Its memory is measured if possible, else
    estimated."""
    memory = view.memory.measured or view.memory.estimated
    vram = sum(memory.vram)
    keep = view.keep_alive.seconds
    stays = view.pinned or math.isinf(keep)
    now = time.time()
    expires = now + _CENTURY if stays else view.expires_at if view.expires_at is not None else now + keep
    return OllamaRunner(
        name=tagged(name),
        model=tagged(name),
        size=memory.ram + vram,
        digest=model_id.partition(":")[2],
        details=_details(model) if model is not None else OllamaDetails(),
        expires_at=_time(expires),
        size_vram=vram,
        context_length=view.context_size,
    )


def shown(name: str, model: StoredModel, abilities: Abilities, parts: ModelDetails) -> OllamaShown:
    """Returns the answer of `POST /api/show`. Its template is in Jinja."""
    metadata = dict(model.config.get(model.format) or {})
    carried = parts.defaults or NO_DEFAULTS
    window = {"num_ctx": abilities.window} if abilities.window else {}
    parameters = {**carried.parameters, **carried.template_arguments, **window}
    lines = render(Modelfile("x", parameters=parameters)).replace("PARAMETER ", "").split("\n", 1)[1].rstrip()
    return OllamaShown(
        modelfile=modelfile(name, ModelDefaults(carried.system, carried.messages, parameters)),
        parameters=lines,
        template=parts.template,
        system=carried.system or "",
        messages=[CarriedMessage(message.role, message.content) for message in carried.messages],
        license="\n".join(parts.licences) or str(metadata.get("general.license", "")),
        details=_details(model),
        model_info={"general.architecture": model.config.get("architecture", ""), **metadata},
        capabilities=capabilities(abilities),
        modified_at=_time(model.created),
    )


def capabilities(abilities: Abilities) -> list[str]:
    """Returns the capabilities by their names in Ollama."""
    return [theirs for ours, theirs in _CAPABILITIES.items() if ours in abilities.capabilities]


def _details(model: StoredModel) -> OllamaDetails:
    config = model.config
    family = str(config.get("architecture", ""))
    return OllamaDetails(
        format=model.format,
        family=family,
        families=[family],
        parameter_size=str(config.get("parameters", "")),
        quantization_level=str(config.get("quantization", "")),
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
