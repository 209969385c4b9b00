"""The token counts at the end of an engine's answer."""

import re

import msgspec

from modelrunner.keys.allowances import BYTES_PER_TOKEN

# A name in the text of an answer does not match: there its quotes are escaped.
_COUNT = re.compile(
    rb'"(prompt_tokens|input_tokens|completion_tokens|output_tokens|cached_tokens|cache_read_input_tokens'
    rb'|cache_n|prompt_n|predicted_n|draft_n)"\s*:\s*(\d{1,12})'
)
_CHUNK_FRAMING = re.compile(rb"\r\n[0-9a-fA-F]+(?:;[^\r\n]*)?\r\n")
_EVENT = b"\ndata: "  # a text within JSON has no line break
_LAST_COUNTS = b'"message_delta"'  # the type of Anthropic's event that counts the answer


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """The token counts of one answer, from its engine. `prompt` includes the `cached` tokens; `drafted` tokens were
    proposed by a draft model."""

    prompt: int = 0
    answer: int = 0
    cached: int = 0
    drafted: int = 0


NONE = Tokens()


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _OpenAIUsage(msgspec.Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _LlamaTimings(msgspec.Struct, frozen=True):
    """llama.cpp's own counts."""

    cache_n: int = 0
    draft_n: int = 0


class _Counted(msgspec.Struct, gc=False):
    """A body of OpenAI's, or the end of one of its events from `usage` on."""

    usage: _OpenAIUsage
    timings: _LlamaTimings = _LlamaTimings()


_USUAL = msgspec.json.Decoder(_Counted)


def tokens_of(tail: bytes, size: int, opening: bytes = b"") -> Tokens:
    """Reads the `usage` of OpenAI's and Anthropic's answers, else the `timings` of llama.cpp (its tools/server/README,
    "timings"), from the last bytes of an answer of `size` bytes, perhaps in chunks. In a stream without them, as after
    its client left, the answer's tokens are estimated: engines send one event for each. `opening` has the first bytes
    of a stream of Anthropic's, which counts the prompt in its first event
    (https://docs.claude.com/en/docs/build-with-claude/streaming)."""
    if len(tail) == size and tail.startswith(b"{"):  # one piece of JSON, as short answers are
        usual = tail
    elif (start := tail.rfind(b'"usage":{"')) >= 0:
        end = tail.find(b"\n", start)
        usual = b"{" + (tail[start:] if end < 0 else tail[start:end])
    else:
        usual = b""
    if usual:
        try:
            counted = _USUAL.decode(usual)
        except msgspec.DecodeError:
            pass  # another family's, or chunks that end in it
        else:
            usage, timings = counted.usage, counted.timings
            details = usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else timings.cache_n
            return Tokens(usage.prompt_tokens, usage.completion_tokens, cached, timings.draft_n)
    if b"\r\n" in tail:
        tail = _CHUNK_FRAMING.sub(b"", tail)
    starts = [at for at in (tail.rfind(b'"usage"'), tail.rfind(b'"timings"')) if at >= 0]
    first, last = _counts(opening, opening.find(b'"usage"')), _counts(tail, min(starts, default=-1))
    if first and _LAST_COUNTS not in tail:  # `first` came from its first event
        last = {}
    if not last:
        first |= {b"output_tokens": _estimate(tail, size)}
    get = (first | last).get
    cached = get(b"cached_tokens", get(b"cache_read_input_tokens", get(b"cache_n", 0)))
    # Anthropic's `input_tokens` are without the cached ones.
    read = get(b"input_tokens", get(b"cache_n", 0) + get(b"prompt_n", 0)) + get(b"cache_read_input_tokens", 0)
    answer = get(b"completion_tokens", get(b"output_tokens", get(b"predicted_n", 0)))
    return Tokens(get(b"prompt_tokens", read), answer, cached, get(b"draft_n", 0))


def with_prompt(tokens: Tokens, body: int, window: int) -> Tokens:
    """Adds an estimate of a prompt that the engine did not count, from the size of the request's `body` in bytes. It is
    at most `window` tokens, since the engine accepted the request."""
    return msgspec.structs.replace(tokens, prompt=min(body // BYTES_PER_TOKEN, window))


def _counts(data: bytes, start: int) -> dict[bytes, int]:
    return {name: int(count) for name, count in _COUNT.findall(data, start)} if start >= 0 else {}


def _estimate(tail: bytes, size: int) -> int:
    """Assumes that the events before the tail are as long as those in it."""
    tail = b"\n" + tail
    events = tail.count(_EVENT)
    return round(events * size / (len(tail) - tail.find(_EVENT))) if events else 0
