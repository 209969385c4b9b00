"""The document of the HTTP interface, as OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.1.html): paths from the
routes, schemas from msgspec structs."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, get_type_hints

import msgspec

from modelrunner.gateway.calls import Dialect
from modelrunner.gateway.routes import all_routes, dialect_of

ALWAYS = (400, 401, 403, 404, 413, 415, 429, 500, 503)
"""The statuses that the checks before every route can answer with, and that of a disk that refuses (`StorageFailed`) or
of a fault of ours."""
_ERRORS = (411, 412, 421, 422, 501, 502, 504, 507)
_PARAMETER = re.compile(r"\{(\w+)(?::([^{}]+))?\}")
_WORDS = re.compile(r"\w+(\|\w+)*")
_ABOUT = """\
A local daemon that runs inference engines. On TCP, where there are API keys, a request needs one that has the scope
which its operation names; /health, /ready, /docs and this document need none. Model references in a path may be
percent-encoded or plain."""
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
_HEADERS = {"X-Request-ID": {"schema": {"type": "string"}, "description": "the request's ID in the daemon's log"}}


@dataclass(frozen=True, slots=True)
class Operation:
    """`text` is a sentence or more, the first of which is the summary. `answer`, `body` and the values of `query` are
    types that msgspec makes a JSON Schema of; an answer of several media types, or a body that is not JSON, is a
    mapping of media types to them. None stands for an empty answer, and for no body. `errors` are the statuses beside
    `ALWAYS`, all with the family's error;
    `also` other answers by their status. An `optional` body may be left out. `local` has the fields of a request that
    are served over the Unix socket alone, "" for the whole request, each with a reason: a sentence that lacks its end,
    "only over the Unix socket"."""

    text: str
    answer: Any
    status: int = 200
    body: Any = None
    optional: bool = False
    query: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    also: Mapping[int, Any] = field(default_factory=dict)
    local: Mapping[str, str] = field(default_factory=dict)


def inference_operations() -> Iterator[tuple[Dialect, str, str, str, Operation]]:
    """Yields (family, method, path, scope, operation) of each route."""
    for pattern, call, route in all_routes():
        operation = Operation(call.text, call.answer, body=call.body, errors=_ERRORS)
        yield route.dialect, "POST", pattern, "inference", operation


def make_document(control: Iterable[tuple[str, str, str, Operation]], version: str) -> dict[str, Any]:
    """Returns the document of the routes of inference and of `control`: (method, path, scope, operation), where a path
    has aiohttp's `{name}` and `{name:expression}`."""
    operations = [*inference_operations(), *((None, *route) for route in control)]
    paths: dict[str, dict[str, Any]] = {}
    schemas = _Schemas()
    errors: dict[str, tuple[type | None, int]] = {}
    for family, method, pattern, scope, operation in operations:
        for path, parameters in _expanded(pattern):
            error = (family or dialect_of(path)).error_shape
            entry = _entry(operation, error, schemas)
            errors |= {_error_name(error, status): (error, status) for status in (*ALWAYS, *operation.errors)}
            entry["parameters"] = parameters + entry["parameters"]
            entry["security"] = [{name: [scope]} for name in _SECURITY] + [{}] if scope else []
            entry["operationId"] = re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")
            entry["tags"] = [family.name if family else _tag(path)]
            paths.setdefault(path, {})[method.lower()] = entry
    document = {
        "openapi": "3.1.0",
        "info": {"title": "modelrunner", "version": version, "description": _ABOUT},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "securitySchemes": _SECURITY,
            "responses": {name: _answer(status, error, schemas) for name, (error, status) in errors.items()},
        },
    }
    return schemas.resolved(document)


def _error_name(error: type | None, status: int) -> str:
    """The name of a response among the components; `error` is None where the family does not describe its errors."""
    return f"{error.__name__ if error else 'Error'}{status}"


def _tag(path: str) -> str:
    words = path.strip("/").split("/")
    tag = words[1] if words[0] in ("v1", "api") and len(words) > 1 else words[0]
    return "ollama" if words[0] == "api" else tag or "daemon"


def _expanded(pattern: str) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    """Yields each path of a pattern with its parameters: a parameter of a few words makes a path for each."""
    for name, expression in _PARAMETER.findall(pattern):
        if expression and _WORDS.fullmatch(expression):
            for word in expression.split("|"):
                yield from _expanded(pattern.replace("{%s:%s}" % (name, expression), word))  # noqa: UP031
            return
    names = [name for name, _ in _PARAMETER.findall(pattern)]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    yield _PARAMETER.sub(r"{\1}", pattern), parameters


def _entry(operation: Operation, error: type | None, schemas: "_Schemas") -> dict[str, Any]:
    text = " ".join(operation.text.split())
    summary = text.partition(". ")[0].rstrip(".")
    for reason in dict.fromkeys(operation.local.values()):
        text += f" {reason[0].upper()}{reason[1:]} only over the Unix socket."
    entry: dict[str, Any] = {"summary": summary, "description": text}
    if operation.local:
        entry["x-unix-socket-only"] = "" in operation.local or sorted(operation.local)
    entry["parameters"] = [
        {"name": name, "in": "query", "required": False, "schema": schemas.of(kind)}
        for name, kind in operation.query.items()
    ]
    if operation.body is not None:
        entry["requestBody"] = {"required": not operation.optional, "content": _content(operation.body, schemas)}
    refusals = {
        status: {"$ref": f"#/components/responses/{_error_name(error, status)}"}
        for status in (*ALWAYS, *operation.errors)
    }
    answers = {operation.status: operation.answer, **operation.also}
    responses = refusals | {status: _answer(status, answer, schemas) for status, answer in answers.items()}
    entry["responses"] = {str(status): responses[status] for status in sorted(responses)}
    return entry


def _answer(status: int, answer: Any, schemas: "_Schemas") -> dict[str, Any]:
    content = {} if answer is None else {"content": _content(answer, schemas)}
    return {"description": HTTPStatus(status).phrase, "headers": _HEADERS, **content}


def _content(kinds: Any, schemas: "_Schemas") -> dict[str, Any]:
    media = kinds if isinstance(kinds, Mapping) else {"application/json": kinds}
    return {name: {"schema": schemas.of(kind)} for name, kind in media.items()}


class _Schemas:
    """Collects types, and puts their schemas in place at the end: msgspec names the components of all together."""

    def __init__(self) -> None:
        self._types: dict[Any, Any] = {}

    def of(self, kind: Any) -> Any:
        """Returns a place holder for the schema of `kind`."""
        if kind is bytes:  # raw bytes, not base64 in JSON
            return {"type": "string", "format": "binary"}
        return self._types.setdefault(str(kind), _Place(plain(kind)))

    def resolved(self, document: dict[str, Any]) -> dict[str, Any]:
        slots = list(self._types.values())
        schemas, components = msgspec.json.schema_components(
            [slot.kind for slot in slots], ref_template="#/components/schemas/{name}"
        )
        for slot, schema in zip(slots, schemas, strict=True):
            slot.schema = schema
        for component in components.values():
            if "description" in component:
                component["description"] = inspect.cleandoc(component["description"])
        document["components"]["schemas"] = components
        resolved: dict[str, Any] = _filled(document)
        return resolved


class _Place:
    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.schema: Any = None


def _filled(value: Any) -> Any:
    match value:
        case _Place():
            return value.schema
        case dict():
            return {name: _filled(inner) for name, inner in value.items()}
        case list():
            return [_filled(inner) for inner in value]
        case _:
            return value


def plain(kind: Any) -> Any:
    """Returns a struct without `msgspec.Raw`, of which msgspec makes no schema: such a field may be any JSON."""
    if not (inspect.isclass(kind) and issubclass(kind, msgspec.Struct)):
        return kind
    hints = get_type_hints(kind)
    if msgspec.Raw not in hints.values():
        return kind
    fields: list[Any] = []
    for each in msgspec.structs.fields(kind):
        if each.type is msgspec.Raw:
            fields.append((each.name, Any, None))
        elif each.required:
            fields.append((each.name, each.type))
        elif each.default_factory is not msgspec.NODEFAULT:
            fields.append((each.name, each.type, msgspec.field(default_factory=each.default_factory)))
        else:
            fields.append((each.name, each.type, each.default))
    return msgspec.defstruct(kind.__name__, fields, namespace={"__doc__": kind.__doc__})
