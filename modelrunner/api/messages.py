"""Reads requests and writes answers of the control plane, in JSON. A wrong field raises a `BadRequest` that names
it."""

from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from aiohttp import web

from modelrunner import wire
from modelrunner.api.middleware import TRANSPORT
from modelrunner.errors import BadRequest, InvalidReference, UnsupportedMediaType
from modelrunner.schema import nearest, wrong_field

T = TypeVar("T")


def json_response(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def read_json(request: web.Request, shape: type[T]) -> T:
    """Returns the body as `shape`. Raises `BadRequest`, and `UnsupportedMediaType` for a web page's body of another
    type than JSON, which a browser sends without a preflight."""
    if "Origin" in request.headers and request.content_type != "application/json":
        raise UnsupportedMediaType("send the body with Content-Type: application/json")
    try:
        return msgspec.json.decode(await read_whole(request), type=shape)
    except msgspec.ValidationError as error:
        raise _wrong(error, shape) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None


async def read_whole(request: web.Request) -> bytes:
    """Returns the body, which counts in `total_body_limit` until the request ends. Raises `PayloadTooLarge` and
    `Unavailable`."""
    pieces, transport = [], request[TRANSPORT]
    async for piece in request.content.iter_any():
        transport.keep(len(piece))
        pieces.append(piece)
    return b"".join(pieces)


def checked(body: Any, shape: type[T]) -> T:
    """Converts a decoded body to `shape`. Raises `BadRequest`."""
    try:
        return msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        raise _wrong(error, shape) from None


def _wrong(error: msgspec.ValidationError, shape: type) -> BadRequest:
    wrong = wrong_field(error, getattr(shape, "__struct_encode_fields__", ()))
    return wrong.saying(f"the body is wrong: {wrong.message}")


def check_query(request: web.Request, *known: str) -> None:
    """Raises `BadRequest` for a query parameter that the route does not have."""
    for name in request.query:
        if name not in known:
            raise BadRequest(f"unknown parameter {name!r}{nearest(name, known)}", param=name)


def query_flag(request: web.Request, name: str) -> bool:
    """Returns True for `?force`, `?force=true` and `?force=1`; False for `false`, `0` and without the parameter. Raises
    `BadRequest`."""
    match request.query.get(name, "false").lower():
        case "" | "1" | "true":
            return True
        case "0" | "false":
            return False
        case other:
            raise BadRequest(f"{name} is true or false, not {other!r}", param=name)


def query_count(request: web.Request, name: str) -> int | None:
    """Returns a whole number of at least 0 from the query; None without the parameter. Raises `BadRequest`."""
    text = request.query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadRequest(f"{name} is a whole number, not {text!r}", param=name)
    return int(text)


def reference_in_path(request: web.Request, marker: str) -> str:
    """Returns the model reference after `marker` in the path: percent-encoded or plain, decoded once. Raises
    `InvalidReference`."""
    return decode_reference(request.rel_url.raw_path.partition(marker)[2])


def decode_reference(raw: str) -> str:
    """Returns a percent-encoded reference as text. Raises `InvalidReference`."""
    try:
        text = unquote(raw, errors="strict")
    except UnicodeDecodeError:
        raise InvalidReference("the model reference in the path is not UTF-8") from None
    if not text:
        raise InvalidReference("the path names no model")
    return text


def page_of(
    request: web.Request, items: Sequence[tuple[str, Any]], *, usual: int, most: int | None = None
) -> web.Response:
    """Answers with the page that the query asks for: `limit` items, `usual` by default and `most` at most, after the
    item with the ID `after`. `items` is the whole list, each item with its ID. Raises `BadRequest`."""
    if (after := request.query.get("after")) is not None:
        place = next((place for place, (id, _) in enumerate(items) if id == after), None)
        if place is None:
            raise BadRequest(f"there is no item {after!r} in this list", param="after")
        items = items[place + 1 :]
    limit = query_count(request, "limit") or usual
    limit = limit if most is None else min(limit, most)
    page = items[:limit]
    first, last = (page[0][0], page[-1][0]) if page else (None, None)
    return json_response(wire.ListPage([item for _, item in page], first, last, len(items) > limit))
