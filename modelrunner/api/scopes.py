"""The scope that an API key needs for a route of the control plane. A route that no rule names needs `admin`."""

import re

from modelrunner.keys.ring import Scope

_LOOKING = ("GET", "HEAD", "OPTIONS")
# Files, batches, stored responses, streams and tools are inference, as are calls that no engine offers; the models that
# are here are for whoever may ask.
_USES = re.compile(r"(/engines)?/v1/(files|batches|responses|streams|tools|moderations|audio)(/.*)?")
_RECORDED = re.compile(r"/engines/requests/[^/]+")  # each key sees its own
_LISTS = re.compile(
    r"/|/version|/models(/.*)?|(/engines(/[^/]+)?|/anthropic)?/v1/models(/.*)?|/api/(version|tags|ps|show)"
)
_ELSEWHERE = re.compile(r"/models/(search|.+/export)")  # what hubs offer; a model that leaves this machine
# What brings, changes or removes models.
_CHANGES = re.compile(
    r"/models(/.*)?|/pulls(/.*)?|/updates|(/engines(/[^/]+)?)?/v1/models/.*|/api/(pull|push|copy|delete|create|blobs/.*)|/engines/df"
)


def scope_of(method: str, path: str) -> Scope:
    """`path` is the client's, without a query. A handler asks for the scope `models` too where its answer comes from
    the source of a model."""
    if _USES.fullmatch(path) or (_RECORDED.fullmatch(path) and method in _LOOKING):
        return Scope.INFERENCE
    if _LISTS.fullmatch(path) and not _ELSEWHERE.fullmatch(path) and (method in _LOOKING or path == "/api/show"):
        return Scope.INFERENCE
    if _CHANGES.fullmatch(path) or (path.startswith("/api/blobs/") and method == "HEAD"):
        return Scope.MODELS
    return Scope.ADMIN
