"""Runs inside vLLM's API server, as an ASGI middleware. It lets through the routes that the daemon uses, answers 421 to
a request for another model, and tells when the engine has dropped the requests of clients that left. It imports nothing
of modelrunner, only the standard library and msgspec, which vLLM needs itself."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, get_args

import msgspec

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_OPEN = frozenset({"/health", "/metrics", "/version", "/v1/models"})
_WITH_MODEL = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
        *("/tokenize", "/detokenize"),
    }
)
# These exist only in vLLM's development mode, which its sleep needs; only the daemon reaches the socket.
_SLEEP = frozenset({"/sleep", "/wake_up", "/is_sleeping", "/collective_rpc"})
_SETTLED = "/modelrunner/settled"
_FIELDS = "/modelrunner/fields"
_OWN_FIELDS = {"model", "adapter"}
# Declared for OpenAI's clients, and used for nothing (vllm/entrypoints/openai/*/protocol.py).
_NEVER_USED = {"user"}


class _RequestNames(msgspec.Struct):
    model: str | None = None
    adapter: Any = None


class ModelGuard:
    """The middleware. `MODELRUNNER_GUARD` holds the names of the model, and vLLM's names for its LoRA adapters by their
    own names. A request of a model with adapters goes to the adapter in its field `adapter`, or to the first."""

    def __init__(self, app: Callable[[Any, Receive, Send], Awaitable[None]]) -> None:
        known = json.loads(os.environ["MODELRUNNER_GUARD"])
        self._app = app
        self._models = frozenset(known["models"])
        self._adapters: dict[str, str] = known["adapters"]
        self._named = msgspec.json.Decoder(_RequestNames)
        self._calls: set[_PendingCall] = set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "lifespan" or path in _OPEN or path in _SLEEP:
            await self._app(scope, receive, send)
        elif path == _SETTLED:
            await self._settled(scope, send)
        elif path == _FIELDS:
            await _answer(send, 200, msgspec.json.encode(_read_fields(scope["app"].routes)))
        elif scope["type"] != "http" or path not in _WITH_MODEL:
            await _refuse(scope, send, 404, "route_not_found", f"there is no route {path} here")
        else:
            await self._for_model(scope, receive, send)

    async def _for_model(self, scope: Message, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        if body is None:
            return  # the client is gone
        try:
            named = self._named.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            await self._app(scope, _PendingCall(body, receive).receive, send)  # vLLM itself reports its faults
            return
        if named.model is not None and named.model not in self._models:
            message = f"this engine serves {sorted(self._models)[0]} and no other model, not {named.model}"
            await _refuse(scope, send, 421, "misdirected_request", message)
        elif named.adapter is not None and not self._knows(named.adapter):
            known = ", ".join(self._adapters) or "none"
            message = f"there is no adapter {str(named.adapter)[:80]!r} for this model; there are: {known}"
            await _refuse(scope, send, 400, "bad_request", message)
        else:
            if self._adapters:
                body, scope = _adapted(body, self._adapters[named.adapter or next(iter(self._adapters))], scope)
            call = _PendingCall(body, receive)
            self._calls.add(call)
            try:
                await self._app(scope, call.receive, send)
            finally:
                self._calls.discard(call)
                call.over.set()

    async def _settled(self, scope: Message, send: Send) -> None:
        """Answers once the engine has dropped the requests of all clients that have left until now. uvicorn closes a
        connection before vLLM knows of it; vLLM then sends the engine's process an abort, which that reads between two
        steps, as it reads the question here (vllm/v1/engine/core.py: `_process_input_queue`)."""
        for call in [call for call in self._calls if call.left]:
            await call.over.wait()
        await scope["app"].state.engine_client.is_sleeping()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def _knows(self, adapter: Any) -> bool:
        return isinstance(adapter, str) and adapter in self._adapters


def _adapted(body: bytes, adapter: str, scope: Message) -> tuple[bytes, Message]:
    """Treats the adapter of a request as vLLM does: as a model of its own."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields.pop("adapter", None)
    fields["model"] = msgspec.Raw(msgspec.json.encode(adapter))
    body = msgspec.json.encode(fields)
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return body, {**scope, "headers": [*headers, (b"content-length", b"%d" % len(body))]}


async def _body(receive: Receive) -> bytes | None:
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


class _PendingCall:
    """A request that vLLM works on. `left` is True once its client is gone, `over` is set when vLLM is done with it."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self.left = False
        self.over = asyncio.Event()
        self._body: bytes | None = body
        self._receive = receive

    async def receive(self) -> Message:
        """Returns the body once more, then every message that comes: the client's leaving."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._receive()
        self.left = self.left or message["type"] == "http.disconnect"
        return message


async def _refuse(scope: Message, send: Send, status: int, code: str, message: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    error = {"message": message, "type": "invalid_request_error", "param": "model", "code": code}
    await _answer(send, status, msgspec.json.encode({"error": error}))


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _read_fields(routes: Iterable[Any]) -> dict[str, list[str]]:
    """Returns the fields of the models by which the routes read their bodies, with the other names of each."""
    fields: dict[str, list[str]] = {}
    for route in routes:
        read = getattr(route, "path", None) in _WITH_MODEL and getattr(route, "dependant", None)
        names = {name for body in (read.body_params if read else ()) for name in _names(body.field_info.annotation)}
        if names:
            fields[route.path] = sorted((names | _OWN_FIELDS) - _NEVER_USED)
    return fields


def _names(annotation: Any) -> Iterator[str]:
    """Yields the fields of a model of pydantic, or of each model in a union. Any other type has none."""
    for kind in get_args(annotation):
        yield from _names(kind)
    for name, field in getattr(annotation, "model_fields", {}).items():
        alias = field.validation_alias or field.alias
        yield from (name, *getattr(alias, "choices", [alias] if alias else []))
