"""The daemon with a model for chats, one that ranks, and a backend that runs the bench's engine:
`daemon.py FOLDER ENGINE PORT`. With OBSERVED in the environment, it counts requests and their use, writes the access
log, and has an API key with limits, whose text is in the file `key` of FOLDER; with COUNTED, it counts requests; with
TLS, it speaks TLS with a certificate of its own; with MESSAGES, its engine has Anthropic's messages."""

import os
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

import uvloop

from modelrunner.backend import Backend, BackendContext, BackendState, BackendStatus, ProgressCallback
from modelrunner.config.locations import Locations
from modelrunner.config.settings import Settings
from modelrunner.daemon.app import serve
from modelrunner.engineapi import MESSAGES_ENDPOINTS, OPENAI_ENDPOINTS, EngineApi
from modelrunner.keys.ring import KeyRing
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.processes import process
from modelrunner.store import Store
from modelrunner.types import Bundle, Launch, Mode, ModelFormat, RequiredMemory, RunSpec


class BenchBackend(Backend):
    name = "bench"
    formats = frozenset({ModelFormat.GGUF})
    modes = frozenset({Mode.COMPLETION, Mode.EMBEDDING, Mode.RERANKING})
    messages = MESSAGES_ENDPOINTS if os.environ.get("MESSAGES") else {}
    engine = ""

    def api(self, spec: RunSpec) -> EngineApi:
        return EngineApi({**OPENAI_ENDPOINTS, **self.messages})

    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        return

    async def uninstall(self) -> None:
        return

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        await process.run(
            [self.engine, str(launch.endpoint.path)], env=process.scrubbed_environment(), options=launch.process
        )

    def status(self) -> BackendStatus:
        return BackendStatus(BackendState.RUNNING, "bench")

    async def disk_usage(self) -> int:
        return 0

    def default_context_size(self, bundle: Bundle) -> int:
        return 4096

    def default_parallel(self, bundle: Bundle, mode: Mode) -> int:
        return 4096  # nothing waits for its turn: it is the way to the engine that is measured

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return RequiredMemory(1 << 20)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def smallest_gguf(*, ranks: bool = False) -> bytes:
    """GGUF version 3 with one or two values and one tensor of 32 floats."""
    metadata = _text("general.architecture") + struct.pack("<I", 8) + _text("bert" if ranks else "llama")
    if ranks:
        metadata += _text("bert.pooling_type") + struct.pack("<II", 4, 4)
    tensor = _text("t") + struct.pack("<IQIQ", 1, 32, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1 + ranks) + metadata + tensor
    return head + bytes(-len(head) % 32) + bytes(128)


def main(folder: Path, engine: str, port: str) -> None:
    environ = {f"MODELRUNNER_{name.upper()}": str(folder / name) for name in ("data_dir", "cache_dir", "runtime_dir")}
    locations = Locations.find(environ | {"MODELRUNNER_CONFIG": str(folder / "none.toml")})
    observed = bool(os.environ.get("OBSERVED"))
    overrides: dict[str, Any] = {"telemetry": True, "access_log": "text"} if observed else {}
    if os.environ.get("COUNTED"):
        overrides["telemetry"] = True
    if os.environ.get("TLS"):
        overrides["tls"] = "self-signed"
    settings = Settings.load(locations, listen=f"127.0.0.1:{port}", keep_alive="-1", max_queue=8192, **overrides)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    store = Store(settings.data_dir)
    for name in ("bench", "ranker"):
        file = store.partial / f"{name}.gguf"
        file.write_bytes(smallest_gguf(ranks=name == "ranker"))
        store.create({"model.gguf": store.ingest(file)}, name)
    if observed:
        most = 1 << 40
        ring = KeyRing(settings.data_dir / "state" / "keys.json")
        _, text = ring.create("bench", requests_per_minute=most, tokens_per_minute=most, concurrency=most)
        (folder / "key").write_text(text)
    BenchBackend.engine = engine
    backend = BenchBackend(BackendContext(engines=folder, cache=folder, logs=folder, settings={}))
    uvloop.run(serve(settings, registry=BackendRegistry({"bench": backend}), last=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
