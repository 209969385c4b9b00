"""A backend without code, for an engine that is a server elsewhere: a subclass sets values."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from urllib.parse import urlsplit

import msgspec

from modelrunner.backend import Backend, BackendContext, BackendState, BackendStatus, DeclaredModel, ProgressCallback
from modelrunner.engine.connections import UpstreamPool
from modelrunner.engineapi import EngineApi
from modelrunner.errors import (
    BackendUnavailable,
    BadRequest,
    EngineFailed,
    EngineProtocolError,
    ModelNotFound,
    ModelRunnerError,
    PayloadTooLarge,
    QueueFull,
    Unavailable,
)
from modelrunner.types import (
    CAPABILITIES,
    DECLARED,
    Bundle,
    Endpoint,
    Launch,
    Mode,
    ModelFormat,
    RequiredMemory,
    RunSpec,
)
from modelrunner.web.session import refused_address, trusted_certificates

_FRESH, _AGAIN = 60.0, 5.0
"""Seconds after which the list of models is asked for again, and those after a failure."""
_LISTING = 4.0
"""Seconds for the list."""
_MOST_MODELS = 2000
_LONGEST_NAME = 256
_CONTEXT = 131_072
"""Tokens of a context whose size the server does not tell."""
_KINDS: Mapping[int, type[ModelRunnerError]] = {
    404: ModelNotFound,
    408: Unavailable,
    413: PayloadTooLarge,
    429: QueueFull,
    503: Unavailable,
}


class _ServerModel(msgspec.Struct):
    """A model in a list of OpenAI's shape, with what servers add."""

    id: str
    capabilities: Any = None
    context_window: Any = None
    context_length: Any = None
    max_model_len: Any = None


class _ServerModels(msgspec.Struct):
    data: list[msgspec.Raw]


class ServerBackend(Backend):
    """Asks the server at `url` for each model. `models` asks it for its list, at most once a minute."""

    formats: ClassVar[frozenset[ModelFormat]] = frozenset({DECLARED})
    uses_external_model_management: ClassVar[bool] = True
    url: ClassVar[str]
    """Its address, with the path before that of each call (`https://server/v1`); without a path, this is `/v1`."""
    key_variable: ClassVar[str] = ""
    """The variable of the daemon's environment that has its key; "" for a server without keys."""
    engine_api: ClassVar[EngineApi]
    """Its HTTP interface."""
    headers: ClassVar[Mapping[str, str]] = {}
    """Headers of each request; `{key}` in them becomes the key."""
    listing: ClassVar[str] = "/v1/models"
    """The path of its list of models."""
    certificates: ClassVar[Path | None] = None
    """A file with certificates to trust besides those of this machine."""
    parallel: ClassVar[int] = 64
    """The most requests to one of its models at once."""
    place: ClassVar[Callable[[], str]] = staticmethod(str)
    """Tells where the configuration file describes it; "" for a class of code."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._endpoint: Endpoint | None = None
        self._key = ""
        self._known: Sequence[DeclaredModel] = ()
        self._asked_at = float("-inf")
        self._fault = ""
        self._asking: asyncio.Task[None] | None = None

    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        raise BackendUnavailable(f"{self.name} is a server elsewhere: there is nothing to install")

    async def uninstall(self) -> None:
        raise BackendUnavailable(f"{self.name} is a server elsewhere: take its table out of the configuration file")

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        raise BackendUnavailable(f"{self.name} is a server elsewhere: there is nothing to start")

    def status(self) -> BackendStatus:
        try:
            self.endpoint()
        except BackendUnavailable as error:
            return BackendStatus(BackendState.ERROR, error.message)
        count = f", {len(self._known)} models" if self._known else ""
        return BackendStatus(BackendState.RUNNING, f"{self.name} at {self.url}{count}", self._fault)

    async def disk_usage(self) -> int:
        return 0

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return RequiredMemory(0)

    def default_context_size(self, bundle: Bundle) -> int:
        return bundle.context_length or _CONTEXT

    def default_parallel(self, bundle: Bundle, mode: Mode) -> int:
        return self.parallel

    def api(self, spec: RunSpec) -> EngineApi:
        return replace(self.engine_api, model_name=self._plain(spec.bundle.name))

    def endpoint(self) -> Endpoint:
        """See `RunsElsewhere`."""
        key = os.environ.get(self.key_variable, "") if self.key_variable else ""
        if self.key_variable and not key:
            raise BackendUnavailable(
                f"the variable {self.key_variable}, which has the key of {self.name}, is not set in the daemon's "
                "environment: set it and start the daemon again"
            )
        if self._endpoint is None or key != self._key:
            self._endpoint, self._key = self._new_endpoint(key), key
        return self._endpoint

    def written_at(self) -> str:
        """See `Configured`."""
        return type(self).place()

    async def models(self) -> Sequence[DeclaredModel]:
        """See `DeclaresModels`. The first call waits for the server's list, and later ones get the last list."""
        age = time.monotonic() - self._asked_at
        if self._asking is None and age > (_AGAIN if self._fault else _FRESH):
            first, self._asked_at = self._asked_at < 0, time.monotonic()
            self._asking = asyncio.get_running_loop().create_task(self._learn())
            if first:
                await asyncio.shield(self._asking)
        return self._known

    def request_error(self, status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
        """See `ExplainsErrors`."""
        said = self._without_key(message)
        if status in (401, 403, 407):
            return EngineFailed(self._refused(status))
        if status == 429:
            return QueueFull(f"{self.name} takes no more requests now: {said}")
        if status < 500 and status not in (402, 405):
            return _KINDS.get(status, BadRequest)(f"{self.name}: {said}")
        return _KINDS.get(status, EngineFailed)(f"{self.name} failed with status {status}: {said}")

    async def _learn(self) -> None:
        try:
            self._known = await self._list()
            self._fault = ""
        except ModelRunnerError as error:
            self._fault = f"its models could not be listed: {error.message}"
        finally:
            self._asking = None

    async def _list(self) -> Sequence[DeclaredModel]:
        endpoint = self.endpoint()
        try:
            status, body = await UpstreamPool(endpoint).fetch("GET", self.listing, timeout=_LISTING)
        except OSError as error:
            raise EngineFailed(str(error) or f"{endpoint} did not answer within {_LISTING:g} seconds") from None
        if status in (401, 403):
            raise EngineFailed(self._refused(status))
        if status != 200:
            raise EngineFailed(f"{endpoint} answered with status {status}")
        try:
            models = msgspec.json.decode(body, type=_ServerModels).data[:_MOST_MODELS]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise EngineProtocolError(f"{endpoint} answered with no list of models: check the address") from None
        return [declared for each in models if (declared := self._declared(each)) is not None]

    def _declared(self, listed: msgspec.Raw) -> DeclaredModel | None:
        """Returns a model of the list, None for what is none."""
        try:
            model = msgspec.json.decode(listed, type=_ServerModel)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if not model.id.isprintable() or not 0 < len(model.id) <= _LONGEST_NAME:
            return None
        able = model.capabilities if isinstance(model.capabilities, list) else []
        sizes = (model.context_window, model.context_length, model.max_model_len)
        context = next((size for size in sizes if type(size) is int and 0 < size < 1 << 40), None)
        return DeclaredModel(
            f"{self.name}/{model.id}", frozenset(CAPABILITIES).intersection(map(str, able)), context_length=context
        )

    def _new_endpoint(self, key: str) -> Endpoint:
        parts = urlsplit(self.url)
        try:
            context = trusted_certificates(besides=self.certificates) if parts.scheme == "https" else None
        except OSError as error:
            raise BackendUnavailable(f"the certificates in {self.certificates} cannot be read: {error}") from None
        headers = {
            name: value.replace("{key}", key) for name, value in self.headers.items() if key or "{key}" not in value
        }
        try:
            return Endpoint(
                host=parts.hostname,
                port=parts.port or (443 if context else 80),
                tls=context,
                name=parts.netloc,
                headers=tuple(headers.items()),
                base=parts.path.rstrip("/") or "/v1",
                refuses=lambda address: refused_address(self.url, address, tls=context is not None),
            )
        except ValueError:
            raise BackendUnavailable(
                f"the key in {self.key_variable} has other characters than printable ASCII"
            ) from None

    def _plain(self, name: str) -> str:
        return name.removeprefix(f"{self.name}/")

    def _refused(self, status: int) -> str:
        if not self.key_variable:
            return f"{self.name} wants a key (status {status}): name the variable that has it with `key-env`"
        return (
            f"{self.name} refuses the key in {self.key_variable} (status {status}): set another, and start the daemon "
            "again"
        )

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "...") if self._key else text
