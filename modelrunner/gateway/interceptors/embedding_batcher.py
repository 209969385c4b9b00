"""Sends requests for single embeddings to the engine together if they come at nearly the same time."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any

import msgspec

from modelrunner.engine.receivers import Collector
from modelrunner.engine.runner import Runner
from modelrunner.engineapi import ApiShape
from modelrunner.errors import EngineProtocolError, ModelRunnerError
from modelrunner.gateway.calls import Inference, Sink, client_of
from modelrunner.gateway.dialects.assembly import BODY_TOO_LARGE, LARGEST_BODY
from modelrunner.gateway.dialects.dialect import engine_model
from modelrunner.gateway.headers import new_request_id
from modelrunner.gateway.interceptors.forwarded_request import ForwardedRequest
from modelrunner.gateway.request.exchange import Exchange, Exchanges
from modelrunner.gateway.request.tokens import NONE, Tokens, with_prompt
from modelrunner.http.answers import Header

_EMBEDDINGS = "/v1/embeddings"
_LONGEST = 64 << 10
"""The largest body that is batched, in bytes: a long text fills the engine's batch by itself."""
_TOKENIZING = 5.0  # seconds
# Texts that are counted at once. llama.cpp's server has few threads, and each open connection takes one for seconds:
# with one for every text, requests waited until others were closed.
_LANES = 2
Members = dict[str, msgspec.Raw]
_members = msgspec.json.Decoder(Members)
_Shape = tuple[object, ...]


class _BatchedAnswer(msgspec.Struct):
    data: list[Members]
    usage: dict[str, Any] | None = None


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class EmbeddingBatcher:
    """An `Interceptor` for `/v1/embeddings` with one text or list of tokens. Requests that come within `window` seconds
    of the first go together, at most `most` of them. Only requests of one caller that differ in nothing but their text
    go together, and only for a model that is resolved already."""

    def __init__(self, exchanges: Exchanges, window: float, most: int) -> None:
        self._exchanges = exchanges
        self._window, self._most = window, most
        self._open: dict[_Shape, _EmbeddingBatch] = {}

    def take(self, ask: Inference, sink: Sink) -> ForwardedRequest | None:
        head = ask.head
        route = head.route
        if route.path != _EMBEDDINGS or route.dialect.name != "openai" or ask.only_loads or len(ask.body) > _LONGEST:
            return None
        target = self._exchanges.leases.known(ask)
        if target is None:
            return None
        try:
            members = _members.decode(ask.body)
            text = _one_text(members.pop("input"))
            if head.key is not None and head.key.limits.seconds is not None:
                return None  # its key limits its own time
            head.check_model(target.spec.bundle)
        except (KeyError, msgspec.MsgspecError, ModelRunnerError):
            return None
        if text is None:
            return None
        shape = (
            *(route, head.caller, head.owner, head.batch, ask.keep_alive, isinstance(text, str)),
            *sorted((name, bytes(value)) for name, value in members.items()),
        )
        batch = self._open.get(shape)
        if batch is None:
            batch = self._open[shape] = _EmbeddingBatch(self._exchanges, members)
            batch.timer = asyncio.get_running_loop().call_later(self._window, self._close, shape)
        request = ForwardedRequest(self._exchanges, ask, sink, batch)
        batch.texts[request] = text
        if len(batch.texts) == self._most:
            batch.timer.cancel()
            del self._open[shape]
            asyncio.get_running_loop().call_soon(batch.ask)  # the last request is yet to begin
        return request

    def _close(self, shape: _Shape) -> None:
        """Sends the batched requests to the engine; the next request begins another batch."""
        if (batch := self._open.pop(shape, None)) is not None:
            batch.ask()


class _EmbeddingBatch:
    """Requests that go together: the `AnswerSource` of their requests, and the `Sink` of the exchange."""

    takes_chunks = False

    def __init__(self, exchanges: Exchanges, members: Mapping[str, msgspec.Raw]) -> None:
        self._exchanges = exchanges
        self._members = members
        self.texts: dict[ForwardedRequest, str | list[int]] = {}
        self.timer: asyncio.TimerHandle
        self._requests: list[ForwardedRequest | None] = []  # None in place of a request whose client has left
        self._exchange: Exchange | None = None
        self._work: asyncio.Task[Any] | None = None
        self._status = 0
        self._headers: tuple[Header, ...] = ()
        self._body = bytearray()

    def ask(self) -> None:
        """Asks the engine. Called once, after the last request was added."""
        self._requests = list(self.texts)
        if len(self.texts) < 2:
            self._each_alone()
            return
        ask = next(iter(self.texts)).ask
        body = msgspec.json.encode({**self._members, "input": list(self.texts.values())})
        # The API key has counted each of the requests, and may ask the model.
        head = msgspec.structs.replace(ask.head, key=None)
        together = msgspec.structs.replace(
            ask, head=head, counted=(), body=body, request_id=new_request_id(), arrived=perf_counter()
        )
        self._exchanges.in_flight.count(client_of(together.head, together.peer), len(body))
        # Each request is recorded in its place.
        self._exchange = Exchange(self._exchanges, together, self, is_told=False)
        self._exchange.start()
        if self._exchange.lease is not None:
            counting = _counted(self._exchange.lease.runner, ask, list(self.texts.values()))
            self._work = asyncio.create_task(counting)

    # AnswerSource

    def begin(self, request: ForwardedRequest) -> None: ...

    def pause(self, request: ForwardedRequest) -> None: ...

    def resume(self, request: ForwardedRequest) -> None: ...

    def leave(self, request: ForwardedRequest) -> None:
        """The other requests go on; without any, the exchange ends. The client pays for the prompt that the engine was
        given."""
        if self._exchange is not None and (lease := self._exchange.lease) is not None:
            request.lease = lease
            request.tokens = with_prompt(NONE, len(request.ask.body), lease.runner.spec.context_size)
        self.texts.pop(request, None)
        self._requests = [None if one is request else one for one in self._requests]
        if self._exchange is not None and not self.texts:
            self._exchange.cancel()
            if self._work is not None:
                self._work.cancel()

    def is_between_events(self) -> bool:
        return False  # it has no events

    # Sink

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        self._status, self._headers = status, headers
        self.write(data)

    def write(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > LARGEST_BODY:
            self._body.clear()
            assert self._exchange is not None
            # Once the exchange is done with this piece.
            asyncio.get_running_loop().call_soon(self._exchange.stop, EngineProtocolError(BODY_TOO_LARGE))

    def finish(self, *, failed: bool = False) -> None:
        self._work = asyncio.create_task(self._answer(self._work))

    def cut(self) -> None:
        self._each_alone()

    def _each_alone(self) -> None:
        """Sends each request alone: a fault of one request must not fail the others."""
        for request in list(self.texts):
            request.go_alone()

    async def _answer(self, counting: "asyncio.Task[list[int]] | None") -> None:
        weights = await counting if counting is not None else [1] * len(self._requests)  # equal parts
        try:
            answers = self._taken_apart(weights) if self._status == 200 else None
        except (msgspec.MsgspecError, ValueError, RecursionError, EngineProtocolError):  # ValueError: invalid UTF-8
            answers = None
        if answers is None:
            self._each_alone()
            return
        for request, (body, tokens) in zip(self._requests, answers, strict=True):
            if request is not None:
                assert self._exchange is not None
                request.lease, request.tokens = self._exchange.lease, Tokens(prompt=tokens)
                request.respond(200, self._headers, len(body), body)
                request.finish()

    def _taken_apart(self, counts: Sequence[int]) -> list[tuple[bytes, int]]:
        """Returns the answer and the tokens of each request, in their order. Raises `EngineProtocolError`."""
        whole = _members.decode(self._body)
        answer = msgspec.json.decode(self._body, type=_BatchedAnswer)
        vectors = {msgspec.json.decode(one.get("index", b"0"), type=int): one for one in answer.data}
        if vectors.keys() != set(range(len(self._requests))):
            raise EngineProtocolError("the engine has not answered each of the texts")
        whole_usage = answer.usage or {}
        shares = {name: split(amount, counts) for name, amount in whole_usage.items() if type(amount) is int}
        answers = []
        for place in range(len(self._requests)):
            vector: dict[str, Any] = {**vectors[place], "index": 0}
            usage = whole_usage | {name: each[place] for name, each in shares.items()}
            body = msgspec.json.encode({**whole, "data": [vector], **({"usage": usage} if usage else {})})
            answers.append((body, usage["prompt_tokens"] if "prompt_tokens" in shares else 0))
        return answers


def split(amount: int, weights: Sequence[int]) -> list[int]:
    """Splits `amount` in proportion to `weights`, into whole numbers with this sum: `weights` itself if that is its
    sum."""
    whole = sum(weights)
    if whole <= 0:
        weights, whole = [1] * len(weights), len(weights)
    ends = [(amount * reached + whole // 2) // whole for reached in accumulate(weights, initial=0)]
    return [end - start for start, end in pairwise(ends)]


def _one_text(raw: msgspec.Raw) -> str | list[int] | None:
    """Returns the only input of a request; None for several inputs, no input, or an invalid one."""
    value = msgspec.json.decode(raw)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        [value] = value
    tokens = isinstance(value, list) and all(type(token) is int for token in value)
    return value if value and (tokens or isinstance(value, str)) else None


async def _counted(runner: Runner, ask: Inference, texts: Sequence[str | list[int]]) -> list[int]:
    """Returns the tokens of each text, as the engine counts them; equal parts if it cannot."""
    if not isinstance(texts[0], str):
        return [len(text) for text in texts]
    if (path := next(runner.api.paths_of(ApiShape.TOKENIZE), None)) is None:
        return [1] * len(texts)
    model = engine_model(runner, ask.fields.model)
    counts: dict[int, int] = {}

    async def count(places: Iterable[int]) -> None:
        with suppress(OSError, EngineProtocolError, msgspec.MsgspecError, ValueError, RecursionError):
            for place in places:
                text = texts[place]
                # llama.cpp's names and vLLM's.
                fields = {"content": text, "prompt": text, "add_special": True, "add_special_tokens": True}
                request = runner.upstream.request("POST", path, msgspec.json.encode({"model": model, **fields}))
                runner.upstream.send(request, collector := Collector())
                _, answer = await collector.done
                counts[place] = len(msgspec.json.decode(answer, type=_Tokenized).tokens)

    with suppress(TimeoutError):
        async with asyncio.timeout(_TOKENIZING):
            await asyncio.gather(*(count(range(lane, len(texts), _LANES)) for lane in range(_LANES)))
    return [counts[place] for place in range(len(texts))] if len(counts) == len(texts) else [1] * len(texts)
