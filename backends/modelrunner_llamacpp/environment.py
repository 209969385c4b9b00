"""The surroundings of a run of llama.cpp: environment variables, and permissions in the sandbox."""

from collections.abc import Collection
from pathlib import Path

from modelrunner.sdk import Permissions, RunSpec, scrubbed_environment
from modelrunner_llamacpp.engines import DEVICE_ORDER, Engine

INSIDE = Path(__file__).with_name("inside")
# libgomp's threads wait for each other in a busy loop, by default for milliseconds. Where two engines share processors,
# each then keeps the other's threads from running: together they gave less than half of what they do with a short loop,
# which costs one engine alone a few percent at most (docs/performance.md).
_SHARED_PROCESSORS = {"GOMP_SPINCOUNT": "300"}
# LLAMA_ARG_* is not among them: those variables would be flags past the allow-list.
_KEPT = ("GGML_*", "LLAMA_CPP_LIB_PATH", "GOMP_*", "OMP_*")


def permissions(engine: Engine, slots: Path | None = None, options: Collection[str] = ()) -> Permissions:
    """Returns the permissions that llama.cpp needs beyond its model. `slots` is the folder for saved slots, None where
    they are not kept. `options` are the names of the run's options."""
    return Permissions(
        reads=(INSIDE, *([engine.folder] if engine.folder else [])),
        writes=(slots,) if slots else (),
        affinity="--numa binds threads to the processors of a node" if "--numa" in options else "",
    )


def variables(spec: RunSpec) -> dict[str, str]:
    """Returns the environment of the engine's process."""
    return _SHARED_PROCESSORS | scrubbed_environment(keep=_KEPT) | DEVICE_ORDER | dict(spec.environment)
