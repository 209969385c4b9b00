"""Which paths are inference, what mode of runner each needs, and its path at the engine. An allow-list: no other path
of an engine can be reached."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from modelrunner.types import Mode


@dataclass(frozen=True, slots=True)
class Route:
    """`path` is the engine's. `backend` is the one that the client's path names; `runner` the ID of the one runner
    that it addresses."""

    mode: Mode
    path: str
    backend: str | None = None
    runner: str | None = None


_CALLS = {
    "chat/completions": Route(Mode.COMPLETION, "/v1/chat/completions"),
    "completions": Route(Mode.COMPLETION, "/v1/completions"),
    "embeddings": Route(Mode.EMBEDDING, "/v1/embeddings"),
    "rerank": Route(Mode.RERANKING, "/v1/rerank"),
    "score": Route(Mode.RERANKING, "/score"),
    "tokenize": Route(Mode.COMPLETION, "/tokenize"),  # neither llama.cpp nor vLLM has these two under /v1
    "detokenize": Route(Mode.COMPLETION, "/detokenize"),
}
_BARE = ("rerank", "score")  # known without /v1/ too, as vLLM and Jina have them
_NAMED = re.compile(r"/(engines|runners)/([A-Za-z0-9][A-Za-z0-9._-]{0,127})/(?:v1/)?([a-z/]+)")
_FIXED = {
    **{f"{prefix}/v1/{call}": route for prefix in ("", "/engines") for call, route in _CALLS.items()},
    **{f"{prefix}/{call}": _CALLS[call] for prefix in ("", "/engines") for call in _BARE},
}


def match(path: str) -> Route | None:
    """For a path as it is in the request line, without a query."""
    return _FIXED.get(path) or _match_named(path)


def _match_named(path: str) -> Route | None:
    found = _NAMED.fullmatch(path)
    if found is None or path not in (f"/{found[1]}/{found[2]}{tail}" for tail in _tails(found[3])):
        return None
    if found[1] == "engines":
        return replace(_CALLS[found[3]], backend=found[2])
    return replace(_CALLS[found[3]], runner=found[2])


def _tails(call: str) -> Iterator[str]:
    if call in _CALLS:
        yield f"/v1/{call}"
    if call in _BARE:
        yield f"/{call}"
