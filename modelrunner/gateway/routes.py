"""The paths of inference: the API family of each, the mode of its runner, and the engine's endpoint. This is an
allow-list: no other path of an engine can be reached."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from modelrunner.errors import NotImplementedHere
from modelrunner.gateway.calls import Call, Dialect, Route
from modelrunner.gateway.dialects.anthropic import Anthropic
from modelrunner.gateway.dialects.cohere import Cohere
from modelrunner.gateway.dialects.ollama import OllamaChat, OllamaEmbed, OllamaGenerate
from modelrunner.gateway.dialects.openai import OpenAI
from modelrunner.gateway.dialects.passthrough import PassThrough
from modelrunner.gateway.dialects.responses import Responses

_NAMED = re.compile(r"/(engines|runners)/([A-Za-z0-9][A-Za-z0-9._-]{0,127})(/[a-z0-9/_-]+)")
_families: list[Dialect] = []
_routes: dict[str, Route] = {}


def register(dialect: Dialect) -> None:
    """Adds a family. A path that there is already keeps its own."""
    _families.append(dialect)
    for prefix in dialect.prefixes:
        for tail, call in dialect.calls.items():
            path = prefix + tail
            _routes.setdefault(
                path, Route(dialect, path, call.mode, call.path, call.instead, call.streams, call.uploads)
            )


register(OPENAI := OpenAI())
register(Responses())
register(Anthropic())
register(Cohere())
register(OllamaChat())
register(OllamaGenerate())
register(OllamaEmbed())


def add_calls(calls: Mapping[str, Call]) -> None:
    """Adds the calls of a backend, by the client's path. Those that are here already stay."""
    new = {path: call for path, call in calls.items() if path not in _routes}
    if new:
        register(PassThrough(new))


def all_routes() -> Iterator[tuple[str, Call, Route]]:
    """Yields the client's path, with its `{names}`, the call of the family, and the route."""
    for dialect in _families:
        for prefix in dialect.prefixes:
            yield from ((prefix + tail, call, _routes[prefix + tail]) for tail, call in dialect.calls.items())


def match(path: str) -> Route | None:
    """Returns the route for a path without its query."""
    return (_routes.get(path) if "{" not in path else None) or _match_named(path)


def _match_named(path: str) -> Route | None:
    match = _NAMED.fullmatch(path)
    if match is None:
        return None
    if match[1] == "engines":
        route = _routes.get("/engines/{backend}" + match[3])
        return replace(route, backend=match[2]) if route is not None else None
    route = _routes.get("/runners/{runner}" + match[3])
    return replace(route, runner=match[2]) if route is not None else None


def check_endpoint(path: str, endpoints: Collection[str], backend: str, instead: str | None = None) -> None:
    """Raises `NotImplementedHere` unless the backend's engine serves the endpoint, or the one `instead`."""
    if path not in endpoints and instead not in endpoints:
        served = ", ".join(sorted(endpoints))
        raise NotImplementedHere(f"the engine of {backend} does not serve {path}; it serves {served}")


def dialect_of(path: str) -> Dialect:
    """Returns the family whose error shape this path has."""
    route = match(path)
    if route is not None:
        return route.dialect
    return next((dialect for dialect in _families if dialect.owns(path)), OPENAI)


def variants(path: str) -> Iterator[str]:
    """Yields variants of an unknown path: without double slashes, with `/v1`, or with a single `/v1`."""
    plain = re.sub("/+", "/", path).rstrip("/")
    yield from (plain, plain.replace("/v1/v1/", "/v1/"), f"/v1{plain}", re.sub("^/[^/]+", r"\g<0>/v1", plain))
    yield re.sub("^/(engines|runners)/[^/]+", r"\g<0>/v1", plain)
