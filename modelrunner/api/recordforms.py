"""Translates the counts and records of requests, and API keys, to the structs of wire."""

import time

import msgspec

from modelrunner import wire
from modelrunner.api.wireforms import moment
from modelrunner.gateway.request.observers import RequestRecord
from modelrunner.keys.ring import ApiKey
from modelrunner.telemetry.history import CountedStep, Latency
from modelrunner.telemetry.recordings import Recorded
from modelrunner.telemetry.usage import UsageSum


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
    texts = (wire.RecordedText(*msgspec.structs.astuple(body)) for body in (found.request, found.answer))
    return wire.RecordedRequest(request(found.record), found.path, *texts)


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


def step(found: CountedStep) -> wire.HistoryStep:
    return wire.HistoryStep(
        found.time,
        found.requests,
        found.failed,
        found.tokens.prompt,
        found.tokens.answer,
        *_latency(found.first_byte),
        *_latency(found.duration),
    )


def _latency(found: Latency | None) -> tuple[float | None, float | None]:
    return (round(found.median, 4), round(found.p95, 4)) if found else (None, None)


def usage(found: UsageSum) -> wire.UsageTotals:
    return wire.UsageTotals(found.name, found.requests, found.prompt, found.answer, round(found.seconds, 3))
