"""`bench --tune`: measures on this machine whether a model answers sooner with drafts of what its conversation repeats,
and keeps what is faster."""

import statistics
from typing import Any

import msgspec

from modelrunner.cli import output
from modelrunner.cli.answer import Answer, Quiet, receive
from modelrunner.cli.client import HttpClient, path
from modelrunner.errors import BadRequest

_ROUNDS = 3
_TOKENS = 160
_LOSS, _GAIN = 0.98, 1.2
"""Drafts stay if no kind of text has less than `_LOSS` of the speed without, and one has at least `_GAIN`."""
_CODE = """def total(items):
    result = 0
    for item in items:
        if item.price is not None:
            result += item.price * item.count
    return result


def average(items):
    result = 0
    for item in items:
        if item.price is not None:
            result += item.price * item.count
    return result / len(items)
"""
_PEOPLE = "\n".join(("Ada, 36, London", "Bob, 25, Paris", "Cleo, 41, Cairo", "Dan, 19, Oslo", "Eve, 52, Rome"))
_STORY = (
    "The old lighthouse stood at the end of the long stone pier. Every evening the keeper climbed the stairs and lit "
    "the lamp. Ships far away saw the light and turned from the rocks. One winter night the storm broke the glass, and "
    "the keeper held the flame in her hands until morning."
)
_KINDS = {
    "code that is edited": f"Return this code, and rename `average` to `mean`:\n```python\n{_CODE}```",
    "a list as JSON": f"Write these people as a JSON list of objects with the keys name, age and city:\n{_PEOPLE}",
    "a text rewritten": f"Repeat this text word for word, and write `she` in place of `the keeper`:\n{_STORY}",
    "a story": "Tell a long story about a dragon who learns to bake bread.",
    "an explanation": "Explain in detail how a car engine works, and why it needs oil.",
}


class Kind(msgspec.Struct, frozen=True):
    """One kind of text: tokens per second without and with drafts, and the ratio of both, a median of `_ROUNDS`."""

    text: str
    plain: float
    drafted: float
    ratio: float


class Tuning(msgspec.Struct, frozen=True):
    """The output of `bench --tune --json`. `drafts` says what is in effect now."""

    model: str
    kinds: list[Kind]
    drafts: bool


def tune(client: HttpClient, model: str) -> Tuning:
    """Measures, and sets `speculative.ngram` or takes it back. The runner is replaced for each round, and requests of
    others are answered meanwhile. Raises `BadRequest` for a model with a draft model of its own, or whose engine has no
    such drafts."""
    shown = client.call("GET", path("models", model), dict[str, Any])
    model = next(iter(shown.get("tags") or ()), model)  # a change takes a whole name
    [before, *_] = client.call("GET", path("engines", "_configure", model=model), list[dict[str, Any]]) or [{}]
    if (before.get("effective") or {}).get("speculative", {}).get("draft_model"):
        raise BadRequest(
            f"{model} has a draft model: `modelrunner configure {model} --draft-model default` takes it back"
        )
    speeds: dict[bool, dict[str, list[float]]] = {way: {kind: [] for kind in _KINDS} for way in (False, True)}
    try:
        for number in range(_ROUNDS):
            for drafts in (False, True):
                output.note(f"round {number + 1} of {_ROUNDS}, {'with' if drafts else 'without'} drafts")
                _use(client, model, drafts)
                _speed(client, model, "Say hello.")  # the load is not measured
                for kind, prompt in _KINDS.items():
                    speeds[drafts][kind].append(_speed(client, model, prompt))
    except BaseException:
        _use(client, model, before=before)
        raise
    kinds = [_compared(kind, speeds[False][kind], speeds[True][kind]) for kind in _KINDS]
    pays = min(kind.ratio for kind in kinds) >= _LOSS and max(kind.ratio for kind in kinds) >= _GAIN
    _use(client, model, pays)
    return Tuning(model, kinds, pays)


def show(done: Tuning) -> None:
    output.table(
        ("TEXT", "T/S", "WITH DRAFTS", "RATIO"),
        [(kind.text, f"{kind.plain:.1f}", f"{kind.drafted:.1f}", f"{kind.ratio:.2f}") for kind in done.kinds],
    )
    if done.drafts:
        output.note(f"drafts stay on; `modelrunner configure {done.model} --draft-ngram off` ends them")
    else:
        output.note(
            f"drafts stay off: they pay only where none is under {_LOSS} and one is at least {_GAIN}; `modelrunner "
            f"configure {done.model} --draft-ngram on` uses them all the same"
        )


def _use(client: HttpClient, model: str, drafts: bool = False, *, before: dict[str, Any] | None = None) -> None:
    """Sets drafts, or what was configured `before`."""
    value = (
        (before.get("config") or {}).get("speculative") if before is not None else {"ngram": True} if drafts else None
    )
    change = {"model": model, "speculative": value, "apply": "restart"}
    client.fetch("POST", "/engines/_configure", change, timeout=None)


def _speed(client: HttpClient, model: str, prompt: str) -> float:
    answer = Answer()
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": _TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for _ in receive(client, body, Quiet(), answer):
        pass
    if answer.speed is None:
        raise BadRequest(f"{model} gave no answer to measure: {prompt.partition(':')[0]}")
    return answer.speed


def _compared(text: str, plain: list[float], drafted: list[float]) -> Kind:
    ratio = statistics.median(after / before for before, after in zip(plain, drafted, strict=True))
    return Kind(text, round(statistics.median(plain), 2), round(statistics.median(drafted), 2), round(ratio, 3))
