"""The backend of Whisper models: faster-whisper behind a small HTTP server of ours."""

import asyncio
import shutil
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType
from typing import ClassVar, NoReturn

from modelrunner.sdk import (
    ApiShape,
    BackendContext,
    BackendUnavailable,
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
from modelrunner_whisper import memory
from modelrunner_whisper.memory import WhisperOptions
from modelrunner_whisper.model import CTRANSLATE2, FORMAT

TRANSCRIPTION = Mode("transcription")
_PROGRAM = Path(__file__).with_name("inside") / "modelrunner_serve.py"
_CALLS = {
    "/v1/audio/transcriptions": "Writes down what is said in a file, in its language.",
    "/v1/audio/translations": "Writes down what is said in a file, in English.",
}
_MOST_THREADS = 8
"""Of one sequence: more make Whisper no faster."""


class WhisperBackend(PackagesBackend):
    name: ClassVar[str] = "whisper"
    title = "faster-whisper"
    packages_version = "1.2.1"
    lock = Path(__file__).with_name("locks") / "whisper.lock"
    module = "faster_whisper, starlette.applications, uvicorn, python_multipart"
    disk_needed = 700 << 20  # the environment took 416 MiB; the rest is room for the wheels
    diagnosis = diagnosis(
        "whisper", "model",
        Cause(r"Unsupported model binary version|Unable to open file|Entry not found",
              "the model's files are damaged or of another release of CTranslate2: remove the model and pull it again"),
        stages=[("importing", "importing"), ("loading the model", "loading weights")],
    )  # fmt: skip
    formats: ClassVar[frozenset[ModelFormat]] = frozenset({CTRANSLATE2})
    modes: ClassVar[frozenset[Mode]] = frozenset({TRANSCRIPTION})
    file_formats = (FORMAT,)
    calls = MappingProxyType(
        {path: ServiceCall(TRANSCRIPTION, ApiShape.TRANSCRIPTION, text) for path, text in _CALLS.items()}
    )
    options_model = WhisperOptions

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if context.state is not None:  # what the runs of a killed daemon left
            shutil.rmtree(context.state, ignore_errors=True)

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        if self.context.state is None:
            raise BackendUnavailable("whisper has no folder for its files")
        scratch = self.context.state / token_hex(8)
        options = WhisperOptions.of(spec.options)
        settings = {
            "model": str(spec.bundle.directory),
            "threads": min(allowed_processors(), _MOST_THREADS),
            "compute_type": options.compute_type,
            "beam_size": options.beam_size,
            "longest": options.longest,
        }
        variables = {"TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1"}
        scratch.mkdir(mode=0o700, parents=True)
        try:
            await self.serve(_PROGRAM, spec, launch, settings, variables, scratch)
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True))

    def api(self, spec: RunSpec) -> EngineApi:
        return EngineApi(
            {path: EndpointApi(ApiShape.TRANSCRIPTION) for path in _CALLS}, metrics=None, settled="/settled"
        )

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return memory.required(spec)

    def growth(self, spec: RunSpec) -> RequiredMemory:
        return memory.growth(spec)

    def default_context_size(self, bundle: Bundle) -> int:
        """Returns the positions of a window of 30 seconds. It means nothing here."""
        return 1500

    def default_parallel(self, bundle: Bundle, mode: Mode) -> int:
        """Returns two sequences at least, so that a long file does not keep a short one waiting."""
        return min(max(2, allowed_processors() // 4), 8)
