"""How many of its draft tokens an engine has accepted, from its own metrics."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from modelrunner.scheduler import RunnerView
from modelrunner.telemetry.exposition import fetch

_LIMIT = 1.0  # seconds for all engines: llama.cpp answers between two batches
# llama.cpp (tools/server/server-context.cpp) and vLLM (v1/spec_decode/metrics.py) use the same names after a prefix.
_COUNT = re.compile(
    r"^\w+:spec_decode_num_(draft|accepted)_tokens_total(?:\{[^}\n]*\})?"
    r" ([0-9]{1,15}(?:\.[0-9]{1,15})?(?:e\+?[01][0-9])?)$",
    re.M,
)
_MOST = 2**53  # JSON numbers are exact up to there


class Drafts(NamedTuple):
    """Tokens since the start of a runner: those that were proposed, and those of them that the model took."""

    proposed: int
    accepted: int


async def drafts_of(runners: Sequence[RunnerView]) -> Mapping[str, Drafts]:
    """Asks the engines of the ready `runners`, at most a second for all of them. Returns the counts by the IDs of
    runners, without those of engines that do not tell or have proposed nothing."""
    answers = await fetch(runners, _LIMIT)
    found = {answer.labels["runner"]: read_drafts(answer.text or "") for answer in answers}
    return {runner: drafts for runner, drafts in found.items() if drafts.proposed}


def read_drafts(text: str) -> Drafts:
    """Reads metrics in Prometheus' text format; a count that is missing is 0."""
    sums = {"draft": 0.0, "accepted": 0.0}
    for name, count in _COUNT.findall(text):
        sums[name] += float(count)
    return Drafts(*(int(min(count, _MOST)) for count in sums.values()))
