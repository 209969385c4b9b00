"""The backend of Piper's voices: piper-tts behind a small HTTP server of ours."""

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
)
from modelrunner.sdk.diagnosis import Cause
from modelrunner.sdk.packages import PackagesBackend, diagnosis
from modelrunner.sdk.processors import allowed_processors
from modelrunner_piper.model import FORMAT, PIPER

SPEECH = Mode("speech")
_PATH = "/v1/audio/speech"
_PROGRAM = Path(__file__).with_name("inside") / "modelrunner_speak.py"
_PROCESS = 100 << 20
"""Bytes of the interpreter with its libraries."""
_SEQUENCE = 320 << 20
"""Bytes of the work on the longest piece of a text."""


class PiperBackend(PackagesBackend):
    name: ClassVar[str] = "piper"
    title = "piper-tts"
    packages_version = "1.8.0"
    lock = Path(__file__).with_name("locks") / "piper.lock"
    module = "piper, av, starlette.applications, uvicorn"
    disk_needed = 600 << 20
    diagnosis = diagnosis(
        "piper", "voice",
        Cause(r"InvalidProtobuf|InvalidGraph|Protobuf parsing failed",
              "the voice's files are damaged: remove the model and pull it again"),
        stages=[("loading the voice", "loading weights")],
    )  # fmt: skip
    formats: ClassVar[frozenset[ModelFormat]] = frozenset({PIPER})
    modes: ClassVar[frozenset[Mode]] = frozenset({SPEECH})
    file_formats = (FORMAT,)
    calls = MappingProxyType(
        {_PATH: ServiceCall(SPEECH, ApiShape.SPEECH, "Speaks a text; the sound comes as it is made.")}
    )

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        settings = {"voice": str(spec.bundle.model_file), "threads": min(allowed_processors(), 4)}
        await self.serve(_PROGRAM, spec, launch, settings)

    def api(self, spec: RunSpec) -> EngineApi:
        return EngineApi({_PATH: EndpointApi(ApiShape.SPEECH)}, metrics=None, settled="/settled")

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return RequiredMemory(_PROCESS + spec.bundle.size) + self.growth(spec)

    def growth(self, spec: RunSpec) -> RequiredMemory:
        return RequiredMemory(spec.parallel * _SEQUENCE)

    def default_context_size(self, bundle: Bundle) -> int:
        """Returns the characters of the longest text."""
        return 4096

    def default_parallel(self, bundle: Bundle, mode: Mode) -> int:
        """Returns two, so that a long text does not keep a short one waiting."""
        return 2
