"""The surroundings of a run of vLLM: environment variables, permissions in the sandbox, its folder, names in shared
memory, and a Ray cluster.

vLLM's processes remove none of their sockets, temporary files and shared memory when they are killed. So each run gets
names of its own, and everything with these names is removed after the run."""

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from modelrunner.sdk import BackendUnavailable, Permissions, RunSpec, scrubbed_environment
from modelrunner_vllm import adapters
from modelrunner_vllm.engines import Engine, EngineKind
from modelrunner_vllm.model_options import VllmOptions

INSIDE = Path(__file__).with_name("inside")
_RAY_LIMIT = 5.0  # seconds; Ray itself reports an unreachable cluster only after a quarter of an hour

_SHARED_MEMORY = Path("/dev/shm")
_RAY_TOKEN = "RAY_AUTH_TOKEN_PATH"  # without it Ray reads ~/.ray/auth_token
_RAY_LOGIN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", _RAY_TOKEN)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The place of one run. `folder` is for its files. The engine's names in shared memory begin with
    `shared_prefix`."""

    folder: Path
    shared_prefix: str


class Scratch:
    """The files that the runs of a data directory leave outside it. `owner` is a path in that directory. The names of
    all files begin with `prefix`, those of semaphores with `sem.` before it."""

    def __init__(self, owner: Path, shared_memory: Path = _SHARED_MEMORY) -> None:
        digest = hashlib.sha256(os.fsencode(owner.absolute())).hexdigest()[:12]
        self.prefix = f"modelrunner-{digest}-"
        self._shared_memory = shared_memory

    @contextmanager
    def run(self) -> Iterator[RunFiles]:
        """Yields the place of one run, and removes it afterwards. All processes of the run must be gone by then."""
        # The name is short, since the path of a socket inside must not exceed 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix=self.prefix))
        try:
            yield RunFiles(folder, folder.name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._forget_shared(folder.name)

    def sweep(self) -> None:
        """Removes the leftovers of a killed daemon's runs. No run of this daemon may be under way."""
        for folder in Path(tempfile.gettempdir()).glob(f"{self.prefix}*"):
            if folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        self._forget_shared(self.prefix)

    def _forget_shared(self, prefix: str) -> None:
        """Removes segments, and semaphores, whose files have names that begin with `sem.`."""
        for pattern in (f"{prefix}*", f"sem.{prefix}*"):
            for file in self._shared_memory.glob(pattern):
                file.unlink(missing_ok=True)


async def check_reachable(address: str) -> None:
    """Raises `BackendUnavailable` unless a process listens at `address` (`host:port`, `ray://host:port`). Ray itself
    resolves "auto"."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        async with asyncio.timeout(_RAY_LIMIT):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError, OverflowError) as error:  # a timeout is an OSError
        raise BackendUnavailable(
            f"the Ray cluster at {address} cannot be reached ({error or 'no answer'}): check `ray-address`, and that "
            "the cluster runs there (`ray status`)"
        ) from None
    writer.close()


def served_names(spec: RunSpec) -> tuple[str, ...]:
    """Returns the model's names for the engine. Its answers carry the first one."""
    return (*spec.bundle.references, spec.model_id)


def permissions(spec: RunSpec, engine: Engine, compiled: Path, scratch: RunFiles) -> Permissions:
    """Returns the permissions that vLLM needs beyond its model. `compiled` is made where it is missing."""
    compiled.mkdir(parents=True, exist_ok=True)
    options = VllmOptions.of(spec.options)
    ray = f"at {options.ray_address}" if options.ray_address else "of this machine"
    return Permissions(
        reads=(
            engine.program.parent.parent,
            INSIDE,
            *(
                (Path(os.environ.get(_RAY_TOKEN) or "~/.ray/auth_token").expanduser(),)
                if options.executor == "ray"
                else ()
            ),
        ),
        writes=(
            scratch.folder,
            compiled,
            _SHARED_MEMORY,
            *((_ray_folder(spec) / "ray",) if options.executor == "ray" else ()),
        ),
        network=f"it works with the Ray cluster {ray}"
        if options.executor == "ray"
        else "vLLM's processes speak with each other over TCP",
        affinity="vLLM has GNU's OpenMP bind threads to processors" if engine.kind is EngineKind.CPU else "",
        scheduling="ZeroMQ, by which vLLM's processes speak, sets the class of its threads, or gives up",
        processes="vLLM runs its engine, its workers and the compiler as processes of their own",
    )


def _ray_folder(spec: RunSpec) -> Path:
    """Returns the folder in which a Ray cluster of this machine has `ray/`, with its address, logs and sockets: as Ray
    itself, RAY_TMPDIR or `/tmp` (ray/_common/utils.py, `get_default_system_temp_dir`)."""
    return Path(spec.environment.get("RAY_TMPDIR") or os.environ.get("RAY_TMPDIR") or "/tmp")


def variables(spec: RunSpec, engine: Engine, compiled: Path, scratch: RunFiles) -> dict[str, str]:
    """Returns the environment of the engine's processes. `compiled` is a folder that keeps compiled code from run to
    run."""
    options = VllmOptions.of(spec.options)
    names = {"models": served_names(spec), "adapters": adapters.names(spec)}
    environment = {
        "PYTHONPATH": str(INSIDE),
        "PYTHONNOUSERSITE": "1",
        "MODELRUNNER_GUARD": json.dumps(names),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(compiled / "huggingface"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": "",  # otherwise vLLM loads every installed plug-in
        "VLLM_CACHE_ROOT": str(compiled / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
        "TRITON_CACHE_DIR": str(compiled / "triton"),
        "TMPDIR": str(scratch.folder),
        "MODELRUNNER_SHARED_MEMORY": scratch.shared_prefix,
        "PATH": f"{engine.program.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # ninja and the compiler
    }
    if options.sleep is not None:
        environment["VLLM_SERVER_DEV_MODE"] = (
            "1"  # its routes for sleep; the guard blocks the other routes of that mode
        )
    if engine.kind is EngineKind.CPU:
        # vLLM cannot load again what this saves for the CPU ("'function' object has no attribute 'finalize_loading'"),
        # and compiles anew; without it the compiler's own cache is used.
        environment["VLLM_USE_AOT_COMPILE"] = "0"
    if options.executor == "ray":
        environment["RAY_ADDRESS"] = options.ray_address or "auto"  # the cluster of this machine, and no new one
        environment |= {name: os.environ[name] for name in _RAY_LOGIN if name in os.environ}
        environment["RAY_USAGE_STATS_ENABLED"] = "0"
        environment["RAY_TMPDIR"] = str(_ray_folder(spec))  # otherwise Ray looks for the cluster in TMPDIR
    return scrubbed_environment() | environment | dict(spec.environment)
