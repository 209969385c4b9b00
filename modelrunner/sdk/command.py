"""A backend without code, for an engine that is a program: a subclass sets values."""

import asyncio
import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar, NoReturn

import msgspec

from modelrunner.backend import Backend, BackendContext, BackendState, BackendStatus, DeclaredModel, ProgressCallback
from modelrunner.engineapi import EngineApi
from modelrunner.errors import BackendUnavailable
from modelrunner.processes.process import run, scrubbed_environment
from modelrunner.sandbox import Permissions
from modelrunner.sdk.processors import allowed_processors
from modelrunner.types import Bundle, Endpoint, Launch, RequiredMemory, RunSpec

log = logging.getLogger(__name__)
_PLACE = re.compile(r"\{([a-z]+)\}")
_STOP_LIMIT = 30.0
"""Seconds that a stop command may take."""
_STOP_TRIES = 5
"""How often it is tried: after its run, and at starts of the daemon."""
_MOST_STOPS = 32
"""How many run at once at a start."""
_living: set[Path] = set()
"""The folders of the runs of this process, of all engines."""


class CommandBackend(Backend):
    """Runs `command` for each model."""

    command: ClassVar[tuple[str, ...]]
    """The program and its arguments, with places such as `{port}`; `config/enginetables.py` has all."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that are added to a scrubbed environment, with places too."""
    working_directory: ClassVar[Path | None] = None
    """The folder in which the program starts; None for the daemon's."""
    stop_signal: ClassVar[int | None] = None
    """The signal that asks the engine to end; None for TERM."""
    stop_grace: ClassVar[float | None] = None
    """The seconds that it then has before it is killed; None for those of the daemon's settings."""
    stop_command: ClassVar[tuple[str, ...]] = ()
    """Ends what the program started outside of its own processes, such as a container. It runs after the program, and
    after a kill of the daemon at its next start, and again at the next starts while it fails, five times in all; the
    status says so. `{id}` becomes the text of the file `{scratch}/id`."""
    engine_api: ClassVar[EngineApi | None] = None
    """The engine's HTTP interface; None for OpenAI's."""
    memory_factor: ClassVar[float] = 1.2
    """The memory of a run as a multiple of its model's size. The first load measures main memory."""
    memory_base: ClassVar[int] = 64 << 20
    """Bytes of a run beside that."""
    memory_token: ClassVar[int] = 0
    """Bytes of a run for each token of all its sequences."""
    device: ClassVar[int | None] = None
    """The number of the device that has this memory; None for main memory."""
    declared: ClassVar[tuple[DeclaredModel, ...]] = ()
    """The models of an engine that manages them itself."""
    place: ClassVar[Callable[[], str]] = staticmethod(str)
    """Tells where the configuration file describes it; "" for a class of code."""
    permissions: ClassVar[Permissions] = Permissions()
    """What the engine may do beyond reading its model (docs/sandbox.md)."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._unstopped: dict[Path, str] = {}
        if self.stop_command and context.state is not None:
            self._stop_left(context.state)

    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        self._program()

    async def uninstall(self) -> None:
        raise BackendUnavailable(f"{self._program()} was not installed by modelrunner: remove it where it came from")

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        program = self._program()
        scratch = self._state() / token_hex(8)
        places = self._places(spec, launch.endpoint, scratch)
        argv = [str(program), *(_filled(argument, places) for argument in self.command[1:])]
        env = scrubbed_environment() | {name: _filled(value, places) for name, value in self.environment.items()}
        options = launch.process
        options = replace(
            options,
            stop_signal=self.stop_signal or options.stop_signal,
            stop_grace=options.stop_grace if self.stop_grace is None else self.stop_grace,
        )
        permissions = self.permissions | Permissions(writes=(scratch,))
        _living.add(scratch)
        scratch.mkdir(mode=0o700, parents=True)
        if self.stop_command:
            left = _Left([_filled(word, places) for word in self.stop_command])
            _record(scratch).write_bytes(msgspec.json.encode(left))
        try:
            await run(
                argv,
                env=env | dict(spec.environment),
                options=options,
                cwd=self.working_directory,
                permissions=permissions,
            )
        finally:
            await asyncio.shield(asyncio.to_thread(self._clean, scratch))
            _living.discard(scratch)

    def status(self) -> BackendStatus:
        try:
            fault = "; ".join(list(self._unstopped.values()))
            return BackendStatus(BackendState.RUNNING, f"{self.name} at {self._program()}", fault)
        except BackendUnavailable as error:
            return BackendStatus(BackendState.ERROR, error.message)

    async def disk_usage(self) -> int:
        return os.stat(self._program()).st_size

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        size = int(spec.bundle.size * self.memory_factor) + self.memory_base
        size += self.memory_token * spec.context_size * spec.parallel
        return RequiredMemory(size) if self.device is None else RequiredMemory(0, (0,) * self.device + (size,))

    def api(self, spec: RunSpec) -> EngineApi:
        api = self.engine_api
        if api is None:
            return super().api(spec)
        name = _filled(api.model_name, _places_of(spec.bundle))
        api = replace(api, model_name=name)
        if api.probe is not None or api.listens_elsewhere:
            return api  # the work of a container is not seen: a probe would end one that is busy with a long prompt
        return api.probed(spec.mode, name or spec.bundle.name)

    def written_at(self) -> str:
        """See `Configured`."""
        return type(self).place()

    def progress(self, line: str) -> str | None:
        return None

    def explain(self, tail: str, quotes: bool) -> str | None:
        """Explains what the sandbox may have refused."""
        if any(words in tail.lower() for words in ("permission denied", "operation not permitted", "cannot fork")):
            reason = "; its sandbox may be the reason: grant what it needs by `permissions` (docs/engines.md)"
            return f"the engine was refused something{f': {tail.strip().splitlines()[-1]}' if quotes else ''}{reason}"
        return None

    def ran_out_of_memory(self, tail: str) -> bool:
        return "out of memory" in tail.lower()

    def models(self) -> tuple[DeclaredModel, ...]:
        """Returns the models that the engine manages itself."""
        return self.declared

    def _program(self) -> Path:
        if (path := shutil.which(self.command[0])) is None:
            place = f" ({where})" if (where := self.written_at()) else ""
            raise BackendUnavailable(f"{self.command[0]} is not a program here: install it, or correct its path{place}")
        return Path(path)

    def _state(self) -> Path:
        if self.context.state is None:
            raise BackendUnavailable(f"{self.name} has no folder for its files")
        return self.context.state

    def _places(self, spec: RunSpec, endpoint: Endpoint, scratch: Path) -> Mapping[str, str]:
        bundle = spec.bundle
        projector = bundle.files.get("mmproj.gguf")
        if projector is None and any("{projector}" in word for word in self.command):
            raise BackendUnavailable(f"the command of {self.name} needs a projector, and {bundle.name} has none")
        return {
            "host": str(endpoint.host),
            "port": str(endpoint.port),
            "socket": str(endpoint.path),
            "key": endpoint.key,
            "projector": str(projector),
            "context": str(spec.context_size),
            "parallel": str(spec.parallel),
            "threads": str(allowed_processors()),
            "device": str(self.device),
            "scratch": str(scratch),
            **_places_of(bundle),
        }

    def _clean(self, scratch: Path) -> None:
        """Ends what a run left outside of its processes, and removes its folder; after a failure both stay for the next
        start."""
        record = _record(scratch)
        with suppress(OSError, msgspec.MsgspecError):
            left = msgspec.json.decode(record.read_bytes(), type=_Left)
            words = list(left.command)
            with suppress(OSError):
                words = [word.replace("{id}", (scratch / "id").read_text()[:256].strip()) for word in words]
            if (why := self._stopped(words)) is not None:
                tries = left.tries + 1
                last = tries >= _STOP_TRIES
                after = "it is not tried again: end it yourself" if last else "it is tried again at the next start"
                self._unstopped[scratch] = fault = f"`{shlex.join(words)}` failed, {tries} times now: {why}; {after}"
                log.error("%s: %s", self.name, fault)
                if not last:
                    record.write_bytes(msgspec.json.encode(_Left(left.command, tries)))
                    return
            else:
                self._unstopped.pop(scratch, None)
        shutil.rmtree(scratch, ignore_errors=True)
        record.unlink(missing_ok=True)

    def _stopped(self, words: Sequence[str]) -> str | None:
        """Runs a stop command, and returns why it failed, None if it did not."""
        try:
            subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=scrubbed_environment() | dict(self.environment),
                timeout=_STOP_LIMIT,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said: bytes = getattr(error, "stderr", None) or b""
            return said[-500:].decode("utf-8", "replace").strip() or str(error)
        return None

    def _stop_left(self, state: Path) -> None:
        """Ends what the runs of a killed daemon left outside of their processes, all at once."""
        left = [scratch for record in state.glob("*.stop") if (scratch := record.with_suffix("")) not in _living]
        if left:
            with ThreadPoolExecutor(min(len(left), _MOST_STOPS)) as pool:
                list(pool.map(self._clean, left))


class _Left(msgspec.Struct):
    """What a run leaves: the `command` that ends it, which has failed `tries` times."""

    command: list[str]
    tries: int = 0


def _record(scratch: Path) -> Path:
    return scratch.with_suffix(".stop")


def _places_of(bundle: Bundle) -> Mapping[str, str]:
    file = next(iter(bundle.files.values()), bundle.name)
    return {"model": str(file), "folder": str(bundle.directory), "name": bundle.name}


def _filled(text: str, places: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda match: places.get(match[1], match[0]), text)
