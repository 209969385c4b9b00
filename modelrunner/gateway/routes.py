"""The paths of inference: which family each belongs to, what mode of runner it needs, and its endpoint at the engine.
An allow-list: no other path of an engine can be reached."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from modelrunner.errors import NotImplementedHere
from modelrunner.gateway.dialects.anthropic import Anthropic
from modelrunner.gateway.dialects.dialect import Dialect
from modelrunner.gateway.dialects.ollama import OllamaChat, OllamaEmbed, OllamaGenerate
from modelrunner.gateway.dialects.openai import OpenAI
from modelrunner.types import Mode


@dataclass(frozen=True, slots=True)
class Route:
    """`pattern` is the client's path, with `{backend}` or `{runner}` in the place of a name; `path` is the engine's
    endpoint. `backend` is the one that the client's path names; `runner` the ID of the one runner that it addresses."""

    dialect: Dialect
    pattern: str
    mode: Mode
    path: str
    backend: str | None = None
    runner: str | None = None


_NAMED = re.compile(r"/(engines|runners)/([A-Za-z0-9][A-Za-z0-9._-]{0,127})(/[a-z0-9/_]+)")
_families: list[Dialect] = []
_routes: dict[str, Route] = {}


def register(dialect: Dialect) -> None:
    """Serves a further family from now on."""
    _families.append(dialect)
    for prefix in dialect.prefixes:
        for tail, call in dialect.calls.items():
            _routes[prefix + tail] = Route(dialect, prefix + tail, call.mode, call.path)


register(OPENAI := OpenAI())
register(Anthropic())
register(OllamaChat())
register(OllamaGenerate())
register(OllamaEmbed())


def match(path: str) -> Route | None:
    """For a path as it is in the request line, without a query."""
    return (_routes.get(path) if "{" not in path else None) or _match_named(path)


def _match_named(path: str) -> Route | None:
    found = _NAMED.fullmatch(path)
    if found is None:
        return None
    if found[1] == "engines":
        route = _routes.get("/engines/{backend}" + found[3])
        return replace(route, backend=found[2]) if route is not None else None
    route = _routes.get("/runners/{runner}" + found[3])
    return replace(route, runner=found[2]) if route is not None else None


def check_endpoint(path: str, endpoints: frozenset[str], backend: str) -> None:
    """Raises `NotImplementedHere` unless the backend's engine serves the endpoint."""
    if path not in endpoints:
        served = ", ".join(sorted(endpoints))
        raise NotImplementedHere(f"the engine of {backend} does not serve {path}; it serves {served}")


def dialect_of(path: str) -> Dialect:
    """The family whose error shape this path has."""
    route = match(path)
    if route is not None:
        return route.dialect
    return next((dialect for dialect in _families if dialect.owns(path)), OPENAI)


def variants(path: str) -> Iterator[str]:
    """What a path that is unknown was perhaps meant to be: without a slash too many, with `/v1`, or with it once."""
    plain = re.sub("/+", "/", path).rstrip("/")
    yield from (plain, plain.replace("/v1/v1/", "/v1/"), f"/v1{plain}", re.sub("^/[^/]+", r"\g<0>/v1", plain))
    yield re.sub("^/(engines|runners)/[^/]+", r"\g<0>/v1", plain)
