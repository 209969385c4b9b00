"""Runs llama.cpp's server inside a Python that has it as a package. It is the child process of a runner.

It is started by path (`python -I modelrunner_serve.py xllamacpp JSON` or `llama_cpp JSON`) with the engine's own
interpreter, where modelrunner is not installed: only the standard library and the engine can be imported here. args.py
makes the JSON. The default action of SIGTERM ends the process at once, also while a model loads.
"""

import contextlib
import functools
import json
import signal
import socket
import sys
from enum import Enum
from pathlib import Path
from typing import Any


def fitted(current: Any, value: Any) -> Any:
    """Converts `value` from JSON to the type of an attribute whose value is `current`."""
    match current:
        case Enum():
            return type(current)[value]
        case set():
            return {value}
        case [Enum(), *_]:
            return [type(current[0])[name] for name in value]
        case [float(), *_]:  # shares per device, of a fixed length
            return [*value, *[0.0] * (len(current) - len(value))]
        case list():
            return [value]
        case _:
            return value


def set_attribute(target: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        target = getattr(target, parent)
    setattr(target, name, fitted(getattr(target, name), value))


def serve_xllamacpp(given: dict[str, Any]) -> None:
    """Serves until the process is told to end. The constructor returns when the model is loaded; /health answers 503
    until then."""
    import xllamacpp

    params, attributes = xllamacpp.CommonParams(), given["attributes"]
    if template := attributes.pop("chat_template_file", None):
        params.chat_template = Path(template).read_text("utf-8")
    params.lora_adapters = [adapter(xllamacpp, *given) for given in attributes.pop("lora_adapters", ())]
    for path, value in attributes.items():
        set_attribute(params, path, value)
    for name in given["pinned"]:
        member = xllamacpp.common_params_sampling_config[f"COMMON_PARAMS_SAMPLING_CONFIG_{name}"]
        params.sampling.user_sampling_config |= int(member)
    server = xllamacpp.Server(params)
    print(f"serving on {server.listening_address}", file=sys.stderr, flush=True)
    while True:
        signal.pause()


def adapter(xllamacpp: Any, path: str, scale: float) -> Any:
    """Returns a LoRA adapter at this scale, which a request may change (`lora`)."""
    info = xllamacpp.CommonAdapterLoraInfo()
    info.path, info.scale = path, scale
    return info


def serve_llama_cpp(given: dict[str, Any]) -> None:
    """Serves until the process is told to end. llama-cpp-python's server has no /health, by default breaks off an
    answer when another request comes, and answers 400 without a message to a request ID that is no UUID
    (starlette-context's plug-in)."""
    import uvicorn
    from llama_cpp.server import app as server
    from llama_cpp.server.settings import ModelSettings, ServerSettings

    settings = ModelSettings(**{"logits_all": False, **given["settings"]})
    server.RequestIdPlugin = functools.partial(server.RequestIdPlugin, validate=False)
    app = server.create_app(server_settings=ServerSettings(interrupt_requests=False), model_settings=[settings])

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    app.add_api_route("/health", health)
    app = OwnParts(app, sees=settings.clip_model_path is not None)
    with socket.socket(socket.AF_UNIX) as listener:
        if given["port"]:
            where = {"host": given["host"], "port": given["port"]}
        else:  # uvicorn changes the mode of a socket that it makes, which the sandbox refuses
            listener.bind(given["host"])
            where = {"fd": listener.fileno()}
        uvicorn.run(app, **where, timeout_graceful_shutdown=2)


class OwnParts:
    """Refuses the parts of a chat's messages that the model cannot take. llama-cpp-python's server leaves out an image
    without a message, and fails in the middle of a stream at an image that it would have to fetch."""

    def __init__(self, app: Any, *, sees: bool) -> None:
        self._app = app
        self._sees = sees

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/chat/completions":
            await self._app(scope, receive, send)
            return
        pieces, message = [], {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] != "http.request":  # the client has left
                return
            pieces.append(message.get("body", b""))
        body = b"".join(pieces)
        if refusal := self._refusal(body):
            error = {"error": {"message": refusal, "type": "invalid_request_error"}}
            await send(
                {"type": "http.response.start", "status": 400, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": json.dumps(error).encode()})
            return
        whole = [{"type": "http.request", "body": body}]

        async def again() -> Any:
            return whole.pop() if whole else await receive()

        await self._app(scope, again, send)

    def _refusal(self, body: bytes) -> str | None:
        for part in parts(body):
            kind = part.get("type")
            if kind != "text" and not (kind == "image_url" and self._sees):
                what = {"image_url": "image", "input_audio": "audio"}.get(str(kind), "this")
                return f"{what} input is not supported"
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, dict) else image
            if kind == "image_url" and not str(url).startswith("data:"):
                return "the engine fetches no images: send one as a data: URL"
        return None


def parts(body: bytes) -> list[dict[str, Any]]:
    """Returns the parts of a chat's messages, none of a malformed body, which the server judges itself."""
    try:
        messages = json.loads(body)["messages"]
        contents = [message.get("content") for message in messages]
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
    lists = (content for content in contents if isinstance(content, list))
    return [part for content in lists for part in content if isinstance(part, dict)]


def main() -> None:
    engine, given = sys.argv[1], json.loads(sys.argv[2])
    serve = {"xllamacpp": serve_xllamacpp, "llama_cpp": serve_llama_cpp}[engine]
    try:
        with contextlib.suppress(KeyboardInterrupt):
            serve(given)
    except (RuntimeError, ValueError, OSError) as error:  # the engine has logged the cause; a traceback would hide it
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
