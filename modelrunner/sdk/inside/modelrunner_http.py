"""The HTTP server that the programs of `PackagesBackend.serve` share, on a Unix socket. It is imported in the engine's
own environment, where modelrunner is not installed: it knows starlette and uvicorn, and nothing of modelrunner."""

import asyncio
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

Answer = Callable[[Request], Awaitable[Response]]
_LONGEST_BODY = 1 << 20  # bytes of a body of JSON


class Refused(Exception):
    """An error of the client. `param` is the field, or the part of a form, at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.status = message, param, status


class Stopped(Exception):
    """The client has left."""


class Job:
    """The work on one request. A thread does it, and stops soon after `stopped` is set; `over` is set when nothing
    works for it any more."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.over = asyncio.Event()

    def stop(self) -> None:
        """Ends the work: the client has left."""
        self.stopped.set()

    def check(self) -> None:
        """Raises `Stopped`."""
        if self.stopped.is_set():
            raise Stopped


class Server:
    """The application: `calls` are the answers to a POST by their paths. `sequences` jobs run at once in `pool`."""

    def __init__(self, sequences: int, calls: Mapping[str, Answer]) -> None:
        self.pool = ThreadPoolExecutor(sequences)
        self._jobs: set[Job] = set()
        own = [Route("/health", self._health), Route("/settled", self._settled)]
        posts = [Route(path, _guarded(call), methods=["POST"]) for path, call in calls.items()]
        self._app = Starlette(routes=[*own, *posts])

    def begin(self, job: Job) -> None:
        """The job exists from now on. `end` must follow."""
        self._jobs.add(job)

    def end(self, job: Job) -> None:
        """Nothing works for the job any more."""
        self._jobs.discard(job)
        job.over.set()

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def _settled(self, request: Request) -> Response:
        """Answers once nothing works for the clients that have left until now."""
        for job in [job for job in self._jobs if job.stopped.is_set()]:
            await job.over.wait()
        return Response(status_code=204)

    def serve(self, path: str) -> None:
        """Serves on the socket at `path` until a signal comes, then ends the process."""
        os.umask(0o177)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            config = uvicorn.Config(
                self._app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=75,
                timeout_graceful_shutdown=1,
            )  # fmt: skip
            uvicorn.Server(config).run(sockets=[listener])
        os._exit(0)  # a thread may still work


def _guarded(call: Answer) -> Answer:
    async def answer(request: Request) -> Response:
        try:
            return await call(request)
        except Refused as refused:
            return failure(refused.status, fault(refused))
        except (Stopped, ClientDisconnect):
            return Response(status_code=499)

    return answer


def settings() -> dict[str, Any]:
    """Returns what `PackagesBackend.serve` was given."""
    values: dict[str, Any] = json.loads(os.environ["MODELRUNNER_SETTINGS"])
    return values


async def left(request: Request, job: Job) -> None:
    """Stops the job when its client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.stop()


async def whole_body(request: Request, longest: int) -> bytes:
    """Returns the body. Raises `Refused` for one of more than `longest` bytes."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > longest:
            raise Refused(f"the body has more than {longest} bytes", status=413)
    return bytes(body)


async def json_body(request: Request) -> dict[str, Any]:
    """Returns the object in the body. Raises `Refused`."""
    body = await whole_body(request, _LONGEST_BODY)
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused("the body is no JSON object")
    return value


def chosen(fields: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
    """Returns the member `name`, the first of `known` if it is not there. Raises `Refused`."""
    value = fields.get(name, known[0])
    if value not in known:
        raise Refused(f"`{name}` must be one of: {', '.join(known[:40])}", name)
    return str(value)


def event(data: Mapping[str, Any]) -> bytes:
    """Returns an event of a stream."""
    return b"data: %b\n\n" % json.dumps(data, ensure_ascii=False).encode()


def fault(error: Exception) -> dict[str, Any]:
    """Returns OpenAI's `error` member."""
    if isinstance(error, Refused):
        code = "payload_too_large" if error.status == 413 else "bad_request"
        return {"message": error.message, "type": "invalid_request_error", "param": error.param, "code": code}
    message = f"the engine failed: {type(error).__name__}"
    return {"message": message, "type": "server_error", "param": None, "code": "engine_failed"}


def failure(status: int, fault: dict[str, Any]) -> Response:
    """Returns an answer that tells a `fault`."""
    return Response(json.dumps({"error": fault}), status, media_type="application/json")
