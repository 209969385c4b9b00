"""The backend of diffusion models: diffusers behind a small HTTP server of ours."""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, NoReturn

from modelrunner.sdk import (
    ApiShape,
    Bundle,
    EndpointApi,
    EngineApi,
    Launch,
    Mode,
    ModelFormat,
    RequiredMemory,
    RunSpec,
    ServiceCall,
    Variant,
)
from modelrunner.sdk.diagnosis import Cause
from modelrunner.sdk.packages import PackagesBackend, TorchSettings, diagnosis
from modelrunner.sdk.processors import allowed_processors
from modelrunner_diffusers import memory
from modelrunner_diffusers.memory import DiffusersOptions
from modelrunner_diffusers.model import DIFFUSERS, FORMAT

IMAGES = Mode("image-generation")
_PATH = "/v1/images/generations"
_FORMS = {
    "/v1/images/edits": "Draws on a picture, in the transparent part of its mask if there is one, what a text says.",
    "/v1/images/variations": "Draws pictures like another one.",
}
_PROGRAM = Path(__file__).with_name("inside") / "modelrunner_draw.py"
_READS = frozenset(
    {
        *("model", "prompt", "negative_prompt", "n", "size", "seed", "steps", "guidance_scale", "response_format"),
        *("output_format", "output_compression", "stream", "partial_images"),
    }
)


class DiffusersBackend(PackagesBackend):
    name: ClassVar[str] = "diffusers"
    title = "diffusers"
    packages_version = "0.42.1"
    lock = Path(__file__).with_name("locks") / "diffusers.lock"
    torch = "torch==2.13.0"
    module = "diffusers, transformers, PIL, starlette.applications, uvicorn"
    disk_needed = 2 << 30  # the environment took 1.2 GiB; the rest is room for the wheels
    settings_model = TorchSettings
    diagnosis = diagnosis(
        "diffusers", "model",
        Cause(r"SafetensorError|Error no file named|does not appear to have a file named|size mismatch",
              "the model's files are damaged or incomplete: remove the model and pull it again"),
        stages=[("importing", "importing"), ("loading the model", "loading weights")],
    )  # fmt: skip
    formats: ClassVar[frozenset[ModelFormat]] = frozenset({DIFFUSERS})
    modes: ClassVar[frozenset[Mode]] = frozenset({IMAGES})
    file_formats = (FORMAT,)
    calls = MappingProxyType(
        {_PATH: ServiceCall(IMAGES, ApiShape.IMAGE, "Draws pictures of what a text says.")}
        | {path: ServiceCall(IMAGES, ApiShape.OPAQUE, text) for path, text in _FORMS.items()}
    )
    options_model = DiffusersOptions

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        settings = {
            "model": str(spec.bundle.directory),
            "threads": allowed_processors(),
            "largest": memory.largest(spec),
            "side": spec.bundle.header.metadata.get("side"),
            "steps": DiffusersOptions.of(spec.options).steps,
        }
        variables = {"HF_HUB_OFFLINE": "1", "DIFFUSERS_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error"}
        await self.serve(_PROGRAM, spec, launch, settings, variables)

    def api(self, spec: RunSpec) -> EngineApi:
        endpoints = {_PATH: EndpointApi(ApiShape.IMAGE, reads=_READS)}
        endpoints |= {path: EndpointApi(ApiShape.OPAQUE) for path in _FORMS}
        return EngineApi(endpoints, metrics=None, settled="/settled")

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return memory.required(spec)

    def growth(self, spec: RunSpec) -> RequiredMemory:
        return memory.growth(spec)

    async def variants(self, spec: RunSpec, budget: RequiredMemory) -> Sequence[Variant]:
        return memory.variants(spec, budget)

    def default_context_size(self, bundle: Bundle) -> int:
        """Returns the tokens of a prompt that CLIP reads. It means nothing here."""
        return 77

    def default_parallel(self, bundle: Bundle, mode: Mode) -> int:
        """Returns one: a picture uses all processors, and the memory of its activations."""
        return 1
