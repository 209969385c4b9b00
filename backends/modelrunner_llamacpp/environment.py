"""The surroundings of a run of llama.cpp: environment variables, and permissions in the sandbox."""

from collections.abc import Collection
from pathlib import Path

from modelrunner.sdk import Permissions, RunSpec, scrubbed_environment
from modelrunner_llamacpp.engines import DEVICE_ORDER, Engine, EngineKind

INSIDE = Path(__file__).with_name("inside")
# libgomp's threads wait for each other in a busy loop, by default for milliseconds. Where two engines share processors,
# each then keeps the other's threads from running: together they gave less than half of what they do with a short loop,
# which costs one engine alone a few percent at most (docs/performance.md).
_SHARED_PROCESSORS = {"GOMP_SPINCOUNT": "300"}
# LLAMA_ARG_* is not among them: those variables would be flags past the allow-list.
_KEPT = ("GGML_*", "LLAMA_CPP_LIB_PATH", "GOMP_*", "OMP_*")


def permissions(engine: Engine, writes: Collection[Path] = (), options: Collection[str] = ()) -> Permissions:
    """Returns the permissions that llama.cpp needs beyond its model. `writes` are its folders: for saved slots, and for
    shaders. `options` are the names of the run's options."""
    return Permissions(
        reads=(INSIDE, *([engine.folder] if engine.folder else [])),
        writes=tuple(writes),
        network="it computes on RPC servers (`rpc`)" if "--rpc" in options else "",
        affinity="--numa binds threads to the processors of a node" if "--numa" in options else "",
    )


def shader_folder(engine: Engine, cache: Path) -> Path | None:
    """Makes and returns the folder in which Vulkan's drivers keep compiled shaders from run to run, None for an engine
    that has none. A start without them takes a processor that plays a device more than a minute."""
    if engine.kind is not EngineKind.NATIVE or engine.devices is False:
        return None
    folder = cache / "llama.cpp-shaders"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def variables(spec: RunSpec, shaders: Path | None) -> dict[str, str]:
    """Returns the environment of the engine's process. `shaders` is the folder for compiled ones (Mesa: envvars.html),
    None where none are kept."""
    kept = {"MESA_SHADER_CACHE_DIR": str(shaders)} if shaders else {}
    return _SHARED_PROCESSORS | scrubbed_environment(keep=_KEPT) | DEVICE_ORDER | kept | dict(spec.environment)
