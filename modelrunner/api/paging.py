"""Pages of OpenAI's lists."""

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from modelrunner import wire
from modelrunner.api.messages import json_response, query_count
from modelrunner.errors import BadRequest


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
