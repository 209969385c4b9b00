"""A mode, a format and an engine of a third party: text in, bytes out. A model is a file with one number, by which the
engine shifts every byte of the text."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from modelrunner.sdk import (
    ApiShape,
    Backend,
    BackendState,
    BackendStatus,
    EndpointApi,
    EngineApi,
    FileFormat,
    FormatReading,
    InvalidModel,
    Launch,
    Mode,
    ModelFormat,
    ProgressCallback,
    RequiredMemory,
    RunSpec,
    ServiceCall,
    run,
    scrubbed_environment,
)

BYTES = Mode("bytes")
SHIFT = ModelFormat("shift")


def read(files: Mapping[str, Path]) -> FormatReading:
    text = next(iter(files.values())).read_text("ascii").strip()
    if not text.isdecimal():
        raise InvalidModel(f"a model of this format is one number, not {text[:20]!r}")
    return FormatReading({"shift": int(text)}, frozenset({"bytes"}))


FORMAT = FileFormat(SHIFT, "*.shift", read)
CALL = ServiceCall(BYTES, text="Turns text into bytes.")
API = EngineApi({"/v1/bytes": EndpointApi(ApiShape.OPAQUE)}, health="/ready", metrics=None)
ENGINE = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"")

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(bytes((byte + shift) % 256 for byte in text))

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

shift = int(open(sys.argv[2]).read())
print("loaded", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
PROGRAM = (sys.executable, "-I", "-S", "-c", ENGINE)


class BytesBackend(Backend):
    name = "bytes"
    formats = frozenset({SHIFT})
    modes = frozenset({BYTES})
    file_formats = (FORMAT,)
    calls = MappingProxyType({"/v1/bytes": CALL})
    uses_tcp = True

    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        return

    async def uninstall(self) -> None:
        return

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        argv = [*PROGRAM, str(launch.endpoint.port), str(spec.bundle.model_file)]
        await run(argv, env=scrubbed_environment(), options=launch.process)

    def status(self) -> BackendStatus:
        return BackendStatus(BackendState.RUNNING, "bytes 1.0")

    async def disk_usage(self) -> int:
        return Path(sys.executable).stat().st_size

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return RequiredMemory(64 << 20)

    def api(self, spec: RunSpec) -> EngineApi:
        return API
