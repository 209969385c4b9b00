"""The times and tokens of requests with the same labels, read from their records once for all counters."""

from collections.abc import Iterator, Sequence
from operator import attrgetter

from modelrunner.gateway.calls import Asked
from modelrunner.gateway.request.observers import RequestRecord
from modelrunner.types import Served

_labels = attrgetter("asked", "served", "status", "error")


class Columns:
    """Records that share `asked`, `served`, `status` and `error`, in columns. Times are as in the records; `firsts` are
    the times to the first byte of records that have one, `each` are the times per token after the first."""

    __slots__ = (
        *("answer", "asked", "cached", "count", "drafted", "durations", "each", "error", "firsts", "loading"),
        *("prompt", "queued", "served", "status"),
    )

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        one = records[0]
        self.asked: Asked = one.asked
        self.served: Served = one.served
        self.status, self.error, self.count = one.status, one.error, len(records)
        self.durations = [record.duration for record in records]
        self.queued = [record.queued for record in records]
        self.loading = [record.loading for record in records]
        firsts, tokens = [record.first_byte for record in records], [record.tokens for record in records]
        answers = [each.answer for each in tokens]
        self.firsts = [first for first in firsts if first is not None]
        self.each = [
            (duration - first) / (answer - 1)
            for duration, first, answer in zip(self.durations, firsts, answers, strict=True)
            if answer > 1 and first is not None
        ]
        self.prompt, self.answer = sum([each.prompt for each in tokens]), sum(answers)
        self.cached, self.drafted = sum([each.cached for each in tokens]), sum([each.drafted for each in tokens])


def columns(records: Sequence[RequestRecord]) -> Iterator[Columns]:
    """Yields the records grouped by their labels. Records that come together often have the same labels."""
    labels = list(map(_labels, records))
    if labels.count(labels[0]) == len(labels):
        yield Columns(records)
        return
    groups: dict[tuple[object, ...], list[RequestRecord]] = {}
    for alike, record in zip(labels, records, strict=True):
        groups.setdefault(alike, []).append(record)
    yield from map(Columns, groups.values())
