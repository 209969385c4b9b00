"""Translates the chunks of a chat to the events of the Responses API, or to one response.

Source of the shapes: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from typing import Any, ClassVar

import msgspec

from modelrunner.gateway.calls import EVENT_STREAM, JSON, decoded
from modelrunner.gateway.dialects.chunks import ChunkTranslation, GrowingToolCall
from modelrunner.gateway.dialects.responses_request import PreparedFields, item_id, new_id
from modelrunner.gateway.response_store import StoredResponse
from modelrunner.http.answers import Header

_encode = msgspec.json.encode


def response_of(fields: PreparedFields, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response in the state `status`: queued, in_progress, completed, incomplete, failed, cancelled."""
    return {
        "id": fields.id,
        "object": "response",
        "created_at": int(fields.created),
        "status": status,
        "background": bool(fields.background),
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "model": fields.model,
        "output": output,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": (fields.reasoning or {}).get("effort"), "summary": None},
        "store": fields.store is not False,
        "temperature": fields.temperature,
        "text": fields.text or {"format": {"type": "text"}},
        "tool_choice": decoded(fields.tool_choice, "tool_choice") or "auto",
        "tools": decoded(fields.tools, "tools") or [],
        "top_p": fields.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": fields.user,
        "metadata": fields.metadata or {},
    }


def keep(fields: PreparedFields, response: dict[str, Any]) -> None:
    """Stores the response's state, unless the request says not to."""
    if (store := fields.responses) is not None:
        previous = fields.previous_response_id or ""
        stored = StoredResponse(
            fields.id, fields.created, previous, fields.items(), response, fields.owner, fields.size
        )
        store.put(stored)


class _OpenItem:
    """A growing item: a text, or thoughts. Its events have `start` before the piece."""

    def __init__(self, kind: str, response: str, index: int) -> None:
        self.id = item_id("msg" if kind == "output_text" else "rs", response, index)
        self.kind = kind
        self.index = index
        self.pieces: list[str] = []
        self.logprobs: list[msgspec.Raw] = []
        event = f"response.{kind}.delta"
        self.start = (
            f'event: {event}\ndata: {{"type":"{event}","item_id":"{self.id}","output_index":{index},"content_index":0,'
            f'"delta":'
        ).encode()

    @property
    def part(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        more: dict[str, Any] = {"annotations": [], "logprobs": self.logprobs} if self.kind == "output_text" else {}
        return {"type": self.kind, "text": text, **more}

    def item(self, status: str) -> dict[str, Any]:
        content = [self.part] if self.pieces else []
        if self.kind == "output_text":
            return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}


class ResponseEvents(ChunkTranslation):
    """The stream of a response."""

    def __init__(self, fields: PreparedFields, headers: tuple[Header, ...]) -> None:
        super().__init__()
        self.headers = (*EVENT_STREAM, *headers)
        self._fields = fields
        self._offered = fields.offered()
        self._begun = False
        self._number = 1 if fields.background else 0  # of the next event; one in the background is created already
        self._done: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None

    def piece(self, data: bytes) -> bytes:
        first = b"" if self._begun else self._begin()
        return first + super().piece(data)

    def _begin(self) -> bytes:
        self._begun = True
        response = response_of(self._fields, "in_progress", [])
        created = b"" if self._number else self.event("response.created", response=response)
        return created + self.event("response.in_progress", response=response)

    def event(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        data = _encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def text(self, text: str, logprobs: list[msgspec.Raw] | None) -> bytes:
        return self._grow("output_text", text, logprobs or [])

    def thought(self, text: str) -> bytes:
        return self._grow("reasoning_text", text, [])

    def _grow(self, kind: str, text: str, logprobs: list[msgspec.Raw]) -> bytes:
        item, before = self._open, b""
        if item is None or item.kind != kind:
            before = self._close()
            item = self._open = _OpenItem(kind, self._fields.id, len(self._done))
            place = {"output_index": item.index, "item": item.item("in_progress")}
            before += self.event("response.output_item.added", **place)
            before += self.event("response.content_part.added", **self._place(item), part=item.part)
        item.pieces.append(text)
        item.logprobs += logprobs
        number = self._number
        self._number += 1
        more = (_encode(text), _encode(logprobs), number)
        return b'%b%b%b,"logprobs":%b,"sequence_number":%d}\n\n' % (before, item.start, *more)

    def _place(self, item: _OpenItem) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.index, "content_index": 0}

    def _close(self, status: str = "completed") -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        place, part = self._place(item), item.part
        self._done.append(item.item(status))
        more: dict[str, Any] = {"logprobs": item.logprobs} if item.kind == "output_text" else {}
        return (
            self.event(f"response.{item.kind}.done", **place, text=part["text"], **more)
            + self.event("response.content_part.done", **place, part=part)
            + self.event("response.output_item.done", output_index=item.index, item=self._done[-1])
        )

    def _call(self, call: GrowingToolCall) -> bytes:
        index, call_id = len(self._done), call.id or new_id("call")
        item = self._offered.item(item_id("fc", self._fields.id, index), call_id, call)
        self._done.append(item)
        kind, content, done = "function_call_arguments", "arguments", {"name": item["name"]}
        if item["type"] == "custom_tool_call":
            kind, content, done = "custom_tool_call_input", "input", {}
        begun = item | {"status": "in_progress", content: ""}
        place = {"item_id": item["id"], "output_index": index}
        done[content] = item[content]
        return (
            self.event("response.output_item.added", output_index=index, item=begun)
            + self.event(f"response.{kind}.delta", **place, delta=item[content])
            + self.event(f"response.{kind}.done", **place, **done)
            + self.event("response.output_item.done", output_index=index, item=item)
        )

    def last(self) -> bytes:
        cut = self.finish_reason in ("length", "content_filter")
        written = self._close("incomplete" if cut else "completed")
        written += b"".join([self._call(call) for call in self.calls])
        response = self._response(cut)
        keep(self._fields, response)
        return written + self.event(f"response.{response['status']}", response=response)

    def _response(self, cut: bool) -> dict[str, Any]:
        usage = self.usage
        response = response_of(self._fields, "incomplete" if cut else "completed", self._done)
        if cut:
            reason = "max_output_tokens" if self.finish_reason == "length" else "content_filter"
            response["incomplete_details"] = {"reason": reason}
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return response


class WholeResponse(ResponseEvents):
    """A response in one piece."""

    whole: ClassVar[bool] = True

    def __init__(self, fields: PreparedFields, headers: tuple[Header, ...]) -> None:
        super().__init__(fields, headers)
        self.headers = (JSON, *headers)

    def event(self, kind: str, **fields: Any) -> bytes:
        return _encode(fields["response"]) if "response" in fields and self.finish_reason else b""
