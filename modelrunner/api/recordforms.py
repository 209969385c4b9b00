"""Translates the counts and records of requests, and API keys, to the structs of wire."""

import time

from modelrunner import wire
from modelrunner.api.wireforms import moment
from modelrunner.gateway.request.observers import RequestRecord
from modelrunner.keys.ring import ApiKey
from modelrunner.telemetry.recordings import Recorded


def request(record: RequestRecord) -> wire.RequestStatus:
    answer = record.tokens.answer
    writing = record.duration - (record.first_byte or 0.0)
    speed = round((answer - 1) / writing, 1) if answer > 1 and record.first_byte is not None and writing > 0 else None
    fields = record.flat()
    del fields["tokens"], fields["trace"]
    for name in ("queued", "loading", "duration", "first_byte"):
        fields[name] = fields[name] and round(fields[name], 4)
    return wire.RequestStatus(
        **{**fields, "time": moment(record.time)},
        prompt_tokens=record.tokens.prompt,
        completion_tokens=answer,
        cached_tokens=record.tokens.cached,
        tokens_per_second=speed,
    )


def recorded(found: Recorded) -> wire.RecordedRequest:
    return wire.RecordedRequest(request(found.record), found.path, found.request, found.answer)


def key(found: ApiKey) -> wire.KeyStatus:
    return wire.KeyStatus(
        found.name,
        [str(scope) for scope in found.scopes],
        list(found.models),
        found.requests_per_minute,
        found.tokens_per_minute,
        found.concurrency,
        found.max_tokens,
        found.max_seconds,
        "batch" if found.batch else "normal",
        moment(found.created),
        moment(found.expires) if found.expires is not None else None,
        found.expires is not None and found.expires <= time.time(),
    )
