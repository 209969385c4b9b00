"""Answers with several choices, from several prompts or from several copies of one.

llama.cpp ends each choice with a `usage` of that choice alone (tools/server/server-task.cpp). OpenAI's API has one for
all of them, in which each prompt counts once (https://platform.openai.com/docs/api-reference/chat-streaming); vLLM too.
"""

from typing import Any

import msgspec

from modelrunner.gateway.dialects.chunks import TokenUsage
from modelrunner.gateway.dialects.completion_logprobs import CompletionEvents
from modelrunner.gateway.dialects.rewritten import RewrittenEvents
from modelrunner.gateway.request.tokens import Tokens


class _TokenTimings(msgspec.Struct, gc=False):
    cache_n: int = 0
    prompt_n: int = 0
    predicted_n: int = 0
    draft_n: int = 0


class _NumberedChoice(msgspec.Struct, gc=False):
    index: int = 0
    finish_reason: str | None = None


class _ChoiceEvent(msgspec.Struct, gc=False):
    choices: list[_NumberedChoice] = []
    usage: TokenUsage | None = None
    timings: _TokenTimings | None = None


_event = msgspec.json.Decoder(_ChoiceEvent | None)


class ChoiceCounts:
    """Counts the tokens of all choices of a stream. The choices of a prompt, `copies` of them, follow each other by
    their index, as engines number them."""

    def __init__(self, copies: int) -> None:
        self._copies = copies
        self._events: dict[int, int] = {}  # of each choice: about one for each token
        self._counted: dict[int, Tokens] = {}
        self._ended: list[int] = []  # the choices that ended since the last usage without a choice
        self._all: Tokens | None = None  # as an engine counted them that counts all at once

    def read(self, data: bytes) -> _ChoiceEvent | None:
        """Takes the data of an event, and returns it; None if it says nothing of choices."""
        try:
            event: _ChoiceEvent | None = _event.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if event is None:
            return None
        for choice in event.choices:
            self._events[choice.index] = self._events.get(choice.index, 0) + 1
            if choice.finish_reason is not None:
                self._ended.append(choice.index)
        tokens = _tokens(event)
        if tokens is not None and event.choices:
            self._counted[event.choices[-1].index] = tokens
        elif tokens is not None:
            if len(self._ended) == 1:
                self._counted[self._ended[0]] = tokens
            else:
                self._all = tokens
            self._ended.clear()
        return event

    @property
    def tokens(self) -> Tokens:
        """The tokens so far. A choice without a count is estimated by its events."""
        if self._all is not None:
            return self._all
        first = [tokens for index, tokens in self._counted.items() if index % self._copies == 0]
        if not first:  # the copies of a prompt end in any order
            first = list(self._counted.values())[:1]
        known, events = self._counted, self._events
        return Tokens(
            sum(tokens.prompt for tokens in first),
            sum(known[index].answer if index in known else count for index, count in events.items()),
            sum(tokens.cached for tokens in first),
            sum(tokens.drafted for tokens in known.values()),
        )

    def usage(self) -> dict[str, Any]:
        """Returns the tokens in OpenAI's form."""
        tokens = self.tokens
        return {
            "prompt_tokens": tokens.prompt,
            "completion_tokens": tokens.answer,
            "total_tokens": tokens.prompt + tokens.answer,
            "prompt_tokens_details": {"cached_tokens": tokens.cached},
        }


def _tokens(event: _ChoiceEvent) -> Tokens | None:
    usage, timings = event.usage, event.timings or _TokenTimings()
    if usage is not None:
        cached = timings.cache_n if usage.prompt_tokens_details is None else usage.cached
        return Tokens(usage.prompt_tokens, usage.completion_tokens, cached, timings.draft_n)
    if event.timings is not None:
        return Tokens(timings.cache_n + timings.prompt_n, timings.predicted_n, timings.cache_n, timings.draft_n)
    return None


class ChoiceEvents(RewrittenEvents):
    """A stream with several choices. With `total`, their usage is one event at its end. `logprobs` has what else
    changes in the events."""

    def __init__(self, counts: ChoiceCounts, *, total: bool, logprobs: CompletionEvents | None) -> None:
        super().__init__()
        self._counts = counts
        self._total = total
        self._logprobs = logprobs
        self._last: dict[str, Any] | None = None  # the last event that had a usage

    @property
    def counted(self) -> Tokens | None:
        return self._counts.tokens

    def event(self, event: bytes) -> bytes:
        if not event.startswith(b"data:"):
            return event
        data = event[5:].strip()
        if data == b"[DONE]" and self._last is not None:
            last = {**self._last, "choices": [], "usage": self._counts.usage()}
            return b"data: %b\n\n%b" % (msgspec.json.encode(last), event)
        if data == b"null":  # llama.cpp begins several completions so
            return b""
        counted = self._counts.read(data)
        if counted is None or counted.usage is None or not self._total:
            return self._logprobs.event(event) if self._logprobs is not None else event
        fields = msgspec.json.decode(data)
        self._last = {name: value for name, value in fields.items() if name != "timings"}
        if not counted.choices:
            return b""
        return b"data: " + msgspec.json.encode({**fields, "usage": None})
