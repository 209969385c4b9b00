"""The daemon in the place of llama-server: its options become a model's configuration, its routes the daemon's."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import requests

from tests.e2e.daemons import Daemon, environment

PORT, VERBOSE = "--port", "--verbose"
# What the daemon decides by itself, or the route of a request, or what a route shows that the daemon does not have.
NOT_NEEDED = {
    "--embedding",
    "--reranking",
    "--no-slots",
    "--metrics",
    "--alias",
    "--host",
    "--slots",
    "--no-ui",
    PORT,
    VERBOSE,
}
# llama-server's paths without /v1, by the daemon's.
RENAMED = {
    "/chat/completions": "/v1/chat/completions",
    "/tokenize": "/v1/tokenize",
    "/detokenize": "/v1/detokenize",
    "/apply-template": "/v1/apply-template",
    "/responses": "/v1/responses",
}
NATIVE = {"/completion", "/completions"}
SETTABLE = ("context-size", "parallel", "gpu-layers", "runtime-flags", "chat-template")
NO_ROUTE = (404, 405, 501)


class Refused(Exception):
    """The daemon takes no such option."""


class ModelServer:
    """What the tests take for a process of llama-server: one model of the daemon, in an engine of its own. The daemon
    is started with the first and serves all."""

    refused: ClassVar[set[str]] = set()
    verbose: ClassVar[bool] = False  # each request asks for it then, since the daemon does not take the option
    _daemon: ClassVar[Daemon | None] = None

    def __init__(self, words: Sequence[str], reference: str) -> None:
        self.returncode: int | None = None
        options = list(_options(words))
        port = dict(options)[PORT]
        daemon = self._started(str(port))
        ModelServer.verbose = VERBOSE in dict(options)
        self.pid = daemon.process.pid if daemon.process else 0
        self._configure(daemon, reference, options)

    def _configure(self, daemon: Daemon, reference: str, options: list[tuple[str, str | None]]) -> None:
        daemon.post("/engines/unload", {"all": True, "force": True})
        config = Path(daemon.environment["MODELRUNNER_CONFIG"])
        config.write_text(f'[aliases]\n"*" = {json.dumps(reference)}\n', "utf-8")  # tests name the models of OpenAI
        answer = daemon.post("/engines/reload", {})  # before the configuration, which goes by aliases too
        assert answer.status_code == 200, answer.text
        change = {"model": reference, **dict.fromkeys(SETTABLE), **_fields(options)}
        answer = daemon.post("/engines/_configure", change)
        if answer.status_code != 202:
            message = answer.json()["error"]["message"]
            self._refuse(next((flag for flag, _ in options if flag in message), "unknown"), message)
        answer = daemon.post("/engines/preload", {"model": reference})
        assert answer.status_code == 200, answer.text
        assert '"error"' not in answer.text, answer.text

    def _refuse(self, option: str, message: str) -> None:
        self.refused.add(option)
        raise Refused(f"{option}: {message}")

    @classmethod
    def _started(cls, port: str) -> Daemon:
        if cls._daemon is None:
            data = Path(os.environ["LLAMA_TESTS_DATA"])
            place = data.parent
            variables = environment(data, place / "run") | {"LLAMA_SERVER_DEBUG_FAKE_TIMING": "1"}
            cls._daemon = Daemon(data, place / "run/modelrunner.sock", variables)
            (place / "config.toml").write_text("", "utf-8")
            engine = os.environ["LLAMA_SERVER_BIN_PATH"]
            cls._daemon.start(listen=f"127.0.0.1:{port}", llama_server=engine)
        return cls._daemon

    @classmethod
    def end(cls) -> None:
        if cls._daemon is not None:
            cls._daemon.stop()

    def poll(self) -> int | None:
        """The daemon stays for the next server; this one ends when it is told to."""
        return self.returncode

    def terminate(self) -> None:
        self.returncode = 0

    kill = terminate

    def wait(self, timeout: float | None = None) -> int:
        return 0


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Reads flags with their values; a flag before another flag has none."""
    for index, word in enumerate(words):
        if _is_flag(word):
            value = words[index + 1] if index + 1 < len(words) else None
            yield word, None if value is None or _is_flag(value) else value


def _is_flag(word: str) -> bool:
    return re.match(r"--?[a-zA-Z]", word) is not None


def _fields(options: Sequence[tuple[str, str | None]]) -> dict[str, Any]:
    """Returns the fields of a model's configuration. What is no field is left to the daemon as a runtime flag."""
    given = dict(options)
    fields: dict[str, Any] = {"llamacpp": {"save-slots": False}, "keep_alive": "-1"}
    parallel = int(given.pop("--parallel", None) or 1)
    fields["parallel"] = parallel
    if context := given.pop("--ctx-size", None):
        fields["context-size"] = int(context) // parallel  # llama-server's is that of all sequences together
    if file := given.pop("--chat-template-file", None):
        fields["chat-template"] = Path(file).read_text("utf-8")
    if (template := given.get("--chat-template")) and not re.fullmatch(r"[\w.-]+", template):
        fields["chat-template"] = given.pop("--chat-template")
    words = [[flag] if value is None else [flag, value] for flag, value in given.items() if flag not in NOT_NEEDED]
    return fields | {"runtime-flags": [word for pair in words for word in pair]}


class RouteMap:
    """The paths of the tests' requests, by the daemon's. `missing` are those that the daemon did not have."""

    def __init__(self) -> None:
        self.missing: set[str] = set()

    def take(self, utils: Any) -> None:
        """Stands before the requests of `utils.ServerProcess`, and sees every answer of `requests` and httpx."""
        server = utils.ServerProcess
        plain, streamed = server.make_request, server.make_stream_request

        def make_request(this: Any, method: str, path: str, data: Any = None, *rest: Any, **options: Any) -> Any:
            answer = plain(this, method, _renamed(path), _asked(path, data), *rest, **options)
            if path in NATIVE and answer.status_code == 200:
                answer.body = _native(answer.body)
            return answer

        def make_stream_request(this: Any, method: str, path: str, data: Any = None, *rest: Any, **options: Any) -> Any:
            for chunk in streamed(this, method, _renamed(path), _asked(path, data), *rest, **options):
                yield chunk["__verbose"] if path in NATIVE and "__verbose" in chunk else chunk

        server.make_request, server.make_stream_request = make_request, make_stream_request
        send = requests.Session.send

        def watched(session: requests.Session, request: Any, **options: Any) -> requests.Response:
            response = send(session, request, **options)
            if response.status_code in NO_ROUTE:
                self.missing.add(f"{request.method} {request.path_url.partition('?')[0]}")
            return response

        requests.Session.send = watched  # type: ignore[method-assign, assignment]


def _renamed(path: str) -> str:
    return "/v1/completions" if path in NATIVE else RENAMED.get(path, path)


def _asked(path: str, data: Any) -> Any:
    """Adds the model that llama-server needs no word for, and asks for the native answer beside OpenAI's."""
    if not isinstance(data, dict):
        return data
    named = data if data.get("model") else {**data, "model": "any"}
    return {**named, "verbose": True} if path in NATIVE or ModelServer.verbose else named


def _native(body: Any) -> Any:
    """The native answer, which the engine puts into the field `__verbose` of OpenAI's. That of a stream, which the
    daemon asks for, has no text, so the text is the answer's own."""
    native = [{**body["__verbose"], "content": choice["text"]} for choice in body["choices"]]
    return native[0] if len(native) == 1 else native
