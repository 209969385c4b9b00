"""The command bench, which measures a model's speed for a client."""

import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import click
import msgspec

from modelrunner import __version__, wire
from modelrunner.cli import output
from modelrunner.cli.answer import Answer, Quiet, receive
from modelrunner.cli.client import HttpClient, path
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.cli.prepare import prepare
from modelrunner.errors import BadRequest, ModelRunnerError

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "into", "its", "forest")


class Step(msgspec.Struct, frozen=True):
    """The result with `concurrency` requests at once: tokens per second of a prompt, of one answer, and of all answers
    together; seconds until the first token, median and longest. A speed is None if the engine counts no tokens."""

    concurrency: int
    requests: int
    prompt_speed: float | None
    answer_speed: float | None
    total_speed: float | None
    first_token: float
    first_token_worst: float


class Benchmark(msgspec.Struct, frozen=True):
    """The output of `bench --json`, and the input of `--compare`."""

    model: str
    backend: str
    version: str
    prompt_tokens: int
    answer_tokens: int
    steps: list[Step]


@dataclass(frozen=True, slots=True)
class _Load:
    model: str
    words: int
    tokens: int

    def body(self) -> dict[str, object]:
        """Returns a question that no cache knows, with an answer of a fixed length (`ignore_eos` of llama.cpp and
        vLLM)."""
        text = " ".join([token_hex(4), *(_WORDS[i % len(_WORDS)] for i in range(self.words))])
        message = {"role": "user", "content": text}
        options = {"max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        ending = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "messages": [message], **options, **ending}


@click.command()
@click.argument("model")
@click.option("--prompt", "words", type=click.IntRange(1), default=400, show_default=True, help="Words of a prompt.")
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens of an answer.")
@click.option("--concurrency", metavar="N,N,...", default="1,2,4", show_default=True, help="Requests at once.")
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="Requests of each client.")
@click.option(
    "--compare",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the output of an earlier run with --json.",
)
@click.option("--tune", "tunes", is_flag=True, help="Measure drafts and flags of the engine, and use what is faster.")
@json_option
@with_client()
def bench(
    client: HttpClient,
    model: str,
    words: int,
    tokens: int,
    concurrency: str,
    rounds: int,
    compare: Path | None,
    tunes: bool,
    as_json: bool,
) -> None:
    """Measure a model's speed, alone and with several requests at once.

    Times are those of a client: they include the daemon's share and the wait for a free slot. Each request has a prompt
    of its own, so no cache helps.
    """
    before = _read(compare) if compare else None
    levels = _levels(concurrency)
    name = prepare(client, model, backend=None, context_size=None)
    if tunes:
        tuned = _tune(client, name)
        output.json(msgspec.json.encode(tuned)) if as_json else _show_tuning(name, tuned)
        return
    load = _Load(name, words, tokens)
    output.note(f"loading {name}")
    warm = _measure(client, load)
    steps = []
    for level in levels:
        output.note(f"{level} at once")
        steps.append(_step(client, load, level, rounds))
    backend = client.call("GET", path("v1", "models", name), dict[str, object]).get("backend")
    used = [int(warm.usage.get(key, 0)) for key in ("prompt_tokens", "completion_tokens")]
    done = Benchmark(name, str(backend or ""), __version__, used[0], used[1], steps)
    if as_json:
        output.json(msgspec.json.encode(done))
        return
    _show(done, before)


def _measure(client: HttpClient, load: _Load) -> Answer:
    answer = Answer()
    for _ in receive(client, load.body(), Quiet(), answer):
        pass
    return answer


def _step(client: HttpClient, load: _Load, level: int, rounds: int) -> Step:
    answers: list[Answer] = []
    faults: list[ModelRunnerError] = []

    def ask() -> None:
        try:
            answers.extend(_measure(client, load) for _ in range(rounds))
        except ModelRunnerError as error:
            faults.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(level)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.monotonic() - begin
    if faults:
        raise faults[0]
    firsts = [answer.first_token if answer.first_token is not None else answer.total for answer in answers]
    count = sum(int(answer.usage.get("completion_tokens", 0)) for answer in answers)
    return Step(
        level,
        len(answers),
        _median([_prompt_speed(answer) for answer in answers]),
        _median([answer.speed for answer in answers]),
        round(count / elapsed, 2) if count else None,
        round(statistics.median(firsts), 4),
        round(max(firsts), 4),
    )


def _prompt_speed(answer: Answer) -> float | None:
    """Returns the engine's own figure if it reports one (llama.cpp's `timings`), else the tokens over the time to the
    first."""
    if speed := answer.timings.get("prompt_per_second"):
        return float(speed)
    count = answer.usage.get("prompt_tokens")
    return count / answer.first_token if count and answer.first_token else None


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 2) if known else None


def _levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        raise click.UsageError(f"--concurrency {text!r}: write numbers from 1 on, such as 1,2,4")
    return levels


def _read(file: Path) -> Benchmark:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Benchmark)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"{file} is not an output of `modelrunner bench --json`: {error}") from None


def _show(done: Benchmark, before: Benchmark | None) -> None:
    output.say(f"{done.model} on {done.backend}: {done.prompt_tokens} tokens in, {done.answer_tokens} out")
    earlier = {step.concurrency: step for step in before.steps} if before else {}
    rows = []
    for step in done.steps:
        old = earlier.get(step.concurrency)
        cells = [
            _cell(getattr(step, name), getattr(old, name, None), digits)
            for name, digits in (
                ("prompt_speed", 1),
                ("answer_speed", 1),
                ("total_speed", 1),
                ("first_token", 3),
                ("first_token_worst", 3),
            )
        ]
        rows.append((str(step.concurrency), *cells))
    output.table(("AT ONCE", "PROMPT T/S", "ANSWER T/S", "ALL T/S", "FIRST TOKEN S", "WORST S"), rows)


def _cell(value: float | None, old: float | None, digits: int) -> str:
    if value is None:
        return "-"
    change = f" ({100 * (value / old - 1):+.0f}%)" if old else ""
    return f"{value:.{digits}f}{change}"


def _tune(client: HttpClient, model: str) -> wire.Tuning:
    """Measures, and sets `tune` to "auto", and `speculative` unless it was chosen. Raises `BadRequest` for a model that
    does not chat, or that has a draft model."""
    output.note("measuring takes minutes; `modelrunner events` shows its end")
    shown = client.call("GET", path("models", model), dict[str, Any])
    model = next(iter(shown.get("tags") or ()), model)  # a change takes a whole name
    done = client.call("POST", "/engines/tune", wire.Tuning, {"model": model}, timeout=None)
    [before, *_] = client.call("GET", path("engines", "_configure", model=model), list[dict[str, Any]]) or [{}]
    wanted = {"tune": "auto"}
    if not (before.get("effective") or {}).get("speculative"):
        wanted["speculative"] = "auto"
    client.fetch("POST", "/engines/_configure", {"model": model, **wanted})
    return done


def _show_tuning(model: str, done: wire.Tuning) -> None:
    rows = [
        (trial.what, text.text, f"{text.plain:.1f}", f"{text.changed:.1f}", f"{text.ratio:.2f}")
        for trial in done.trials
        for text in trial.texts
    ]
    rows += [(trial.what, f"it does not start: {trial.fault}", "", "", "") for trial in done.trials if trial.fault]
    output.table(("CHANGE", "TEXT", "T/S", "WITH IT", "RATIO"), rows)
    output.note(f"{done.reason}; it holds from the next load, and `modelrunner configure {model}` shows the settings")
