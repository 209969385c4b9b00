"""Shows one answer on the terminal, from the stream of a chat completion."""

import sys
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from modelrunner.cli.client import HttpClient, decode, failure
from modelrunner.cli.output import DIM, PLAIN, has_styles, is_terminal, moves_cursor, note, shown, styled, width
from modelrunner.cli.terminal import Wrapper, no_echo, repeats
from modelrunner.errors import AnswerBroken
from modelrunner.units import format_duration

PROGRESS_EVENT = "modelrunner.progress"
REPETITION = "repetition"
"""The finish reason of an answer that the command line stopped."""
_BETWEEN_CHECKS = 200  # characters
_CUT_SHORT = {
    "length": "(the answer was cut off at the token limit)",
    REPETITION: "(stopped: the answer repeats itself; a temperature above 0 often helps)",
}


class _StreamDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _StreamChoice(msgspec.Struct):
    delta: _StreamDelta = msgspec.field(default_factory=_StreamDelta)
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    error: Any = None


class _Stage(msgspec.Struct):
    """The daemon's `modelrunner.progress` (docs/api.md). Times are in seconds; `position` counts the models that
    wait."""

    stage: str = ""
    waited: float = 0.0
    position: int | None = None
    expected_seconds: float | None = None

    def __str__(self) -> str:
        parts = [self.stage]
        if self.position and self.stage == "queued":
            parts.append(f"place {self.position} in the queue")
        if self.expected_seconds:
            parts.append(f"about {format_duration(round(self.expected_seconds))} left")
        return ", ".join(parts)


@dataclass(slots=True)
class Answer:
    """The received part of an answer. Times are seconds since the request; `server_timing` is the header of that name.
    `waited` is the wait for the model in the daemon's last report."""

    text: str = ""
    finish_reason: str | None = None
    waited: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    server_timing: str = ""
    first_token: float | None = None
    total: float = 0.0

    @property
    def speed(self) -> float | None:
        """The tokens per second after the first one; None if the engine counts no tokens, or there are too few."""
        count = self.usage.get("completion_tokens", 0)
        if self.first_token is None or count < 2 or self.total <= self.first_token:
            return None
        return float((count - 1) / (self.total - self.first_token))


class Screen:
    """Shows an answer: text on stdout, with `markdown` rendered if it is a terminal; thinking, dimmed, on stdout if it
    is a terminal; progress before the first word on stderr, if it is a terminal."""

    def __init__(self, *, hide_thinking: bool = False, markdown: bool = False) -> None:
        self._thinks = not hide_thinking and is_terminal(sys.stdout)
        self._thinking = False
        self._stage = False
        self._at_line_start = True
        self._wrapper = Wrapper(lambda: width() or 0) if moves_cursor(sys.stdout) else None
        self._markdown = None
        if markdown and moves_cursor(sys.stdout):
            from modelrunner.cli.markdown import MarkdownView  # heavy

            self._markdown = MarkdownView(self._write)

    def stage(self, text: str) -> None:
        """Shows a line that the next one replaces, such as "loading weights"."""
        if moves_cursor(sys.stderr):
            self._stage = True
            line = styled(" ".join(shown(text, sys.stderr).split()), DIM, sys.stderr)
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def thought(self, text: str) -> None:
        if self._thinks:
            if not self._thinking:
                self._thinking = True
                self._write(DIM if has_styles(sys.stdout) else "Thinking:\n")
            self._write(self._wrapped(text))

    def text(self, text: str) -> None:
        self._end_thinking()
        if self._markdown:
            self._markdown.feed(shown(text, sys.stdout))
            return
        self._at_line_start = text.endswith("\n")  # set before the write: Ctrl-C may come between the two
        self._write(self._wrapped(text))

    def finish(self) -> None:
        """Ends the line and every style, after the last word or after an interruption."""
        self._end_thinking()
        self._clear_stage()
        if self._markdown:
            self._markdown.finish()
        elif not self._at_line_start:
            self.text("\n")

    def _end_thinking(self) -> None:
        if self._thinking:
            self._thinking = False
            self._write(f"{PLAIN}\n\n" if has_styles(sys.stdout) else "\n\nAnswer:\n")

    def _wrapped(self, text: str) -> str:
        safe = shown(text, sys.stdout)
        return self._wrapper.feed(safe) if self._wrapper else safe

    def _clear_stage(self) -> None:
        if self._stage:
            self._stage = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        self._clear_stage()
        sys.stdout.write(text)
        sys.stdout.flush()


class Quiet(Screen):
    """Shows no answer."""

    def text(self, text: str) -> None: ...
    def thought(self, text: str) -> None: ...
    def stage(self, text: str) -> None: ...


def stream(client: HttpClient, body: dict[str, Any], screen: Screen, answer: Answer) -> None:
    """Sends the request and shows the answer to a person: an answer that repeats itself without end is stopped, and
    typed keys do not stand in it. `answer` and the errors are those of `receive`."""
    headers = {"X-Progress": "events"} if moves_cursor(sys.stderr) else {}
    checked = 0
    with no_echo(), closing(receive(client, body, screen, answer, headers)) as events:
        for _ in events:
            if len(answer.text) >= checked + _BETWEEN_CHECKS:
                checked = len(answer.text)
                if repeats(answer.text):
                    answer.finish_reason = REPETITION
                    return


def receive(
    client: HttpClient,
    body: dict[str, Any],
    screen: Screen,
    answer: Answer,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Generator[None]:
    """Sends the request and yields after every event of the answer; `answer` holds the received part, also after an
    error. Raises the errors of `HttpClient`, the error of an event in the middle of the stream, and `AnswerBroken` if
    the stream stops without an end."""
    begin = time.monotonic()
    sent = {"Accept": "text/event-stream", **headers} if headers else {}
    try:
        with client.open("POST", "/v1/chat/completions", body, headers=sent) as response:
            answer.server_timing = response.getheader("Server-Timing", "")
            complete = False
            for event in client.events(response):
                if event.data == "[DONE]":
                    complete = True  # read on to the end: an early exit would count as a cancellation
                elif event.name == PROGRESS_EVENT:
                    stage = decode(event.data, _Stage)
                    answer.waited = stage.waited
                    screen.stage(str(stage))
                else:
                    _take(decode(event.data, _Chunk), screen, answer, begin)
                yield
        if not complete:
            raise AnswerBroken("the answer ended before it was complete; see `modelrunner logs`")
    finally:
        answer.total = time.monotonic() - begin
        screen.finish()


def _take(chunk: _Chunk, screen: Screen, answer: Answer, begin: float) -> None:
    if chunk.error is not None:
        raise failure(chunk.error)
    answer.usage = chunk.usage or answer.usage
    answer.timings = chunk.timings or answer.timings
    for choice in chunk.choices:
        answer.finish_reason = choice.finish_reason or answer.finish_reason
        if answer.first_token is None and (choice.delta.content or choice.delta.reasoning_content):
            answer.first_token = time.monotonic() - begin
        if choice.delta.reasoning_content:
            screen.thought(choice.delta.reasoning_content)
        if choice.delta.content:
            answer.text += choice.delta.content
            screen.text(choice.delta.content)


def show_end(answer: Answer) -> None:
    """Reports why an answer is incomplete, if it is."""
    if answer.finish_reason in _CUT_SHORT:
        note(_CUT_SHORT[answer.finish_reason])


def show_timings(answer: Answer) -> None:
    """Shows times and speeds on stderr: those of the engine if it reports them (llama.cpp's `timings`), else those
    measured here."""
    spans = {"total": answer.total} | ({} if answer.first_token is None else {"first token": answer.first_token})
    for part in answer.server_timing.split(","):
        name, _, milliseconds = part.strip().partition(";dur=")
        if name in ("queue", "load") and milliseconds:
            spans[name] = float(milliseconds) / 1000
    if answer.waited and not spans.get("load"):  # the head was sent while the model was loading
        spans.pop("queue", None)
        spans["load"] = answer.waited
    for name, seconds in reversed(spans.items()):
        note(f"{name + ':':<13}{format_duration(round(seconds, 3))}")
    speeds = answer.timings
    for name, counted, timed in (("prompt", "prompt_tokens", "prompt"), ("answer", "completion_tokens", "predicted")):
        count = answer.usage.get(counted, speeds.get(f"{timed}_n"))
        rate = speeds.get(f"{timed}_per_second")
        if count is not None:
            note(f"{name + ':':<13}{count} tokens" + (f", {rate:.1f} tokens/s" if rate else ""))
