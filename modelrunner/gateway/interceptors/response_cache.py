"""The response cache: identical requests with a deterministic answer share one answer."""

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from modelrunner.aliases import Alias
from modelrunner.defaults import ModelDefaults, RequestParameters
from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.calls import Inference, Sink
from modelrunner.gateway.interceptors.forwarded_request import ForwardedRequest, served_by
from modelrunner.gateway.interceptors.shared_response import SharedResponse
from modelrunner.gateway.request.exchange import Exchange, Exchanges
from modelrunner.http.answers import Header
from modelrunner.scheduler import Target
from modelrunner.types import RunnerKey, Served

_HEADER = b"X-Modelrunner-Cache"
_SHARE = 8  # the largest answer has one part in so many of the memory
_OVERHEAD = 1024  # bytes of an answer without its body, about

_RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's LLAMA_DEFAULT_SEED
_ERRORS = (b"event: error\n", b'data: {"error"')  # their beginning in an engine's own stream
RequestDigest = tuple[str, str | None, str | None, str, str, bool, Alias | None, bytes]


class _Sampling(msgspec.Struct, gc=False):
    temperature: float | None = None
    seed: int | None = None

    def is_determined(self) -> bool:
        """A negative seed stands for a random one."""
        return self.temperature == 0 or (self.seed is not None and 0 <= self.seed != _RANDOM_SEED)


class _OllamaSampling(msgspec.Struct, gc=False):
    options: _Sampling | None = None


_decoder = msgspec.json.Decoder(_Sampling)
_ollama_decoder = msgspec.json.Decoder(_OllamaSampling)


class _CachedAnswer(NamedTuple):
    """An answer of the runner `key` to the model name `model`; `served` is as a `ForwardedRequest`'s."""

    headers: tuple[Header, ...]
    length: int | None
    body: bytes
    model: str
    key: RunnerKey
    model_id: str
    served: Served
    defaults: ModelDefaults | None
    parameters: RequestParameters | None
    created: float

    @property
    def size(self) -> int:
        return len(self.body) + _OVERHEAD


class ResponseCache:
    """An `Interceptor` that keeps answers: at most `memory` bytes together, each for at most `age` seconds; the least
    recently used goes first. A caller gets answers to its own requests only, and an answer is valid as long as the same
    configuration of the same model would answer. `clock` is in seconds."""

    def __init__(
        self, exchanges: Exchanges, memory: int, age: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._exchanges = exchanges
        self._memory, self._age, self._clock = memory, age, clock
        self._kept: OrderedDict[RequestDigest, _CachedAnswer] = OrderedDict()
        self._size = 0  # bytes
        self._running: dict[RequestDigest, SharedResponse] = {}

    def take(self, ask: Inference, sink: Sink) -> ForwardedRequest | None:
        if ask.only_loads or ask.fields.prepares or not _is_determined(ask):
            return None
        head = ask.head
        digest = (
            *(head.route.pattern, head.route.backend, head.route.runner, head.caller, head.owner),
            *(head.progress, ask.alias),
            blake2b(ask.body, digest_size=32).digest(),
        )
        if (kept := self._find(digest, ask)) is not None:
            age = b"%d" % (self._clock() - kept.created)
            return ForwardedRequest(
                self._exchanges, ask, sink, _RememberedAnswer(kept), headers=((_HEADER, b"hit"), (b"Age", age))
            )
        running = self._running.get(digest)
        if running is not None and not running.start and self._may_ask(ask):
            return ForwardedRequest(self._exchanges, ask, sink, running, headers=((_HEADER, b"shared"),))
        return self._ask(digest, ask, sink)

    def _ask(self, digest: RequestDigest, ask: Inference, sink: Sink) -> ForwardedRequest:
        def ended() -> None:
            if self._running.get(digest) is shared:
                del self._running[digest]
            self._keep(digest, shared, exchange)

        def unheard() -> None:
            exchange.cancel()
            ended()

        shared = SharedResponse(self._memory // _SHARE, unheard=unheard, ended=ended)
        shared.work = exchange = Exchange(self._exchanges, ask, shared)
        self._running[digest] = shared
        return ForwardedRequest(self._exchanges, ask, sink, shared, headers=((_HEADER, b"miss"),), counted_by=exchange)

    def _keep(self, digest: RequestDigest, shared: SharedResponse, exchange: Exchange) -> None:
        head, lease = shared.head, exchange.lease
        if not shared.complete or shared.failed or shared.start or head is None or head[0] != 200 or lease is None:
            return
        if exchange.ask.fields.stream and (lease.waited or any(error in shared.data for error in _ERRORS)):
            return  # its stream may begin with signs of life, or the engine ended it with an error
        if exchange.ask.chosen and digest[-2] is None:
            return  # another model answered, for want of memory
        model = exchange.ask.fields.model
        kept = _CachedAnswer(
            *(head[1], head[2], bytes(shared.data), model, lease.runner.key, lease.target.model_id, served_by(lease)),
            *(lease.target.spec.bundle.defaults, lease.parameters, self._clock()),
        )
        self._forget(digest)
        self._kept[digest] = kept
        self._size += kept.size
        while self._size > self._memory:
            self._forget(next(iter(self._kept)))

    def _find(self, digest: RequestDigest, ask: Inference) -> _CachedAnswer | None:
        kept = self._kept.get(digest)
        if kept is None:
            return None
        target = self._target(ask, kept.model)
        if (
            kept.created < self._clock() - self._age
            or target is None
            or (target.key, target.model_id, target.spec.bundle.defaults, target.parameters)
            != (kept.key, kept.model_id, kept.defaults, kept.parameters)
        ):
            self._forget(digest)
            return None
        if not self._may_ask(ask, target):
            return None
        self._kept.move_to_end(digest)
        return kept

    def _forget(self, digest: RequestDigest) -> None:
        if (kept := self._kept.pop(digest, None)) is not None:
            self._size -= kept.size

    def _target(self, ask: Inference, model: str) -> Target | None:
        return self._exchanges.leases.resolve.known.get((ask.head.route.backend, model, ask.head.route.mode))

    def _may_ask(self, ask: Inference, target: Target | None = None) -> bool:
        """True if the request's API key may still ask the model."""
        if ask.head.key is None:
            return True
        target = target or self._target(ask, ask.fields.model)
        if target is None:
            return False
        try:
            ask.head.check_model(target.spec.bundle)
        except ModelRunnerError:
            return False
        return True


class _RememberedAnswer:
    """The `AnswerSource` of a kept answer."""

    def __init__(self, kept: _CachedAnswer) -> None:
        self._kept = kept

    def begin(self, request: ForwardedRequest) -> None:
        request.served = self._kept.served
        request.respond(200, self._kept.headers, self._kept.length, self._kept.body)
        request.finish()

    def pause(self, request: ForwardedRequest) -> None: ...

    def resume(self, request: ForwardedRequest) -> None: ...

    def leave(self, request: ForwardedRequest) -> None: ...

    def is_between_events(self) -> bool:
        return False  # it is whole at once


def _is_determined(ask: Inference) -> bool:
    """True if the request asks for the most probable tokens, or names a seed."""
    body, options = ask.body, None
    if b'"temperature"' not in body and b'"seed"' not in body:
        return False
    try:
        if ask.head.route.dialect.name == "ollama":
            options = _ollama_decoder.decode(body).options
        else:
            options = _decoder.decode(body)
    except msgspec.MsgspecError:
        return False
    return options is not None and options.is_determined()
