"""The surroundings of a run of llama.cpp: environment variables, and permissions in the sandbox."""

from collections.abc import Collection
from pathlib import Path

from modelrunner.sdk import Permissions, RunSpec, scrubbed_environment
from modelrunner_llamacpp.engines import DEVICE_ORDER, Engine, EngineKind

INSIDE = Path(__file__).with_name("inside")
# libgomp's threads wait for each other in a busy loop, by default for milliseconds. Where two engines share processors,
# each then keeps the other's threads from running: together they give a third. With a short loop the threads sleep and
# wake at each step of the work, and the system likes to leave a thread on the processor of the one that woke it: a lone
# engine then has half its speed. Bound to a core each, threads cannot meet there, and a loop that is longer than a step
# costs other engines nothing (docs/performance.md).
_FREE = {"GOMP_SPINCOUNT": "300"}
BOUND = {"GOMP_SPINCOUNT": "3000", "OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
"""Variables of GNU's OpenMP for an engine with a thread for each core: libgomp, "Environment Variables"."""
_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
_COUNTS = ("--threads", "--threads-batch", "--numa")
# LLAMA_ARG_* is not among them: those variables would be flags past the allow-list.
_KEPT = ("GGML_*", "LLAMA_CPP_LIB_PATH", "GOMP_*", "OMP_*")


def has_bound_threads(engine: Engine, options: Collection[str]) -> bool:
    """True for an engine that computes on the processor with as many threads as llama.cpp chooses itself, one for each
    core. Fewer, bound, would leave some cores to no engine. An engine with devices has other work for its threads:
    those that read requests would share the first core."""
    return engine.devices is False and not any(name in options for name in _COUNTS)


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


def variables(spec: RunSpec, shaders: Path | None, bound: bool) -> dict[str, str]:
    """Returns the environment of the engine's process. `shaders` is the folder for compiled ones (Mesa: envvars.html),
    None where none are kept. `bound` gives each thread a core of its own, unless somebody chose where they run."""
    kept = {"MESA_SHADER_CACHE_DIR": str(shaders)} if shaders else {}
    chosen = scrubbed_environment(keep=_KEPT) | DEVICE_ORDER | kept | dict(spec.environment)
    return (BOUND if bound and not any(name in chosen for name in _PLACES) else _FREE) | chosen
