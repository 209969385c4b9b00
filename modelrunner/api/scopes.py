"""The scope that an API key needs for a route of the control plane: `admin` if no rule matches the route."""

import re

from modelrunner.keys.ring import Scope

_LOOKING = ("GET", "HEAD", "OPTIONS")
# Files, batches, stored responses, streams and tools are inference, as are calls that no engine offers. A key for
# inference also lists the stored models.
_USES = re.compile(r"(/engines)?/v1/(files|batches|responses|streams|tools|moderations|audio|images|realtime)(/.*)?")
_RECORDED = re.compile(r"/engines/requests/[^/]+")  # each key sees its own
_LISTS = re.compile(
    r"/|/version|/models(/.*)?|(/engines(/[^/]+)?|/anthropic)?/v1/models(/.*)?|/api/(version|tags|ps|show)"
)
_ELSEWHERE = re.compile(r"/models/(search|.+/export)")  # the models of hubs; a model that leaves this machine
# Routes that add, change or remove models.
_CHANGES = re.compile(
    r"/models(/.*)?|/pulls(/.*)?|/updates|(/engines(/[^/]+)?)?/v1/models/.*|/api/(pull|push|copy|delete|create|blobs/.*)|/engines/df"
)


def scope_of(method: str, path: str) -> Scope:
    """Returns the scope for the client's path, without its query. A handler that asks the source of a model checks the
    scope `models` too."""
    if _USES.fullmatch(path) or (_RECORDED.fullmatch(path) and method in _LOOKING):
        return Scope.INFERENCE
    if _LISTS.fullmatch(path) and not _ELSEWHERE.fullmatch(path) and (method in _LOOKING or path == "/api/show"):
        return Scope.INFERENCE
    if _CHANGES.fullmatch(path) or (path.startswith("/api/blobs/") and method == "HEAD"):
        return Scope.MODELS
    return Scope.ADMIN
