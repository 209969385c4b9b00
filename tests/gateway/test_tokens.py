"""Token counts, read from the end of real answers."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.gateway.request.tokens import NONE, Tokens, tokens_of

OPENAI = (
    b'{"choices":[{"finish_reason":"stop","index":0,"message":{"role":"assistant","content":"Paris"}}],'
    b'"usage":{"completion_tokens":8,"prompt_tokens":42,"total_tokens":50,"prompt_tokens_details":{"cached_tokens":31}}}'
)
ANTHROPIC = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"cache_read_input_tokens":3,"input_tokens":9,"output_tokens":7}}\n\n'
)
TIMINGS = (
    b'data: {"choices":[{"delta":{}}],"timings":{"cache_n":30,"prompt_n":12,"prompt_ms":9.5,"predicted_n":64,'
    b'"predicted_ms":812.1,"draft_n":40,"draft_n_accepted":31}}\n\ndata: [DONE]\n\n'
)


def test_each_family() -> None:
    assert tokens_of(OPENAI, len(OPENAI)) == Tokens(42, 8, 31, 0)
    assert tokens_of(ANTHROPIC, len(ANTHROPIC)) == Tokens(12, 7, 3, 0)
    assert tokens_of(TIMINGS, len(TIMINGS)) == Tokens(42, 64, 30, 40)


def test_an_answer_that_talks_about_usage_is_not_counted() -> None:
    said = rb'{"content":"say \"usage\": \"prompt_tokens\": 999 and \"completion_tokens\": 9"}'
    assert tokens_of(said, len(said)) == NONE


def test_a_text_like_an_event_is_not_counted() -> None:
    """As the answer of /detokenize may have it."""
    said = b'{"content":"event: x\\ndata: a, and data: b"}'
    assert tokens_of(said, len(said)) == NONE


def test_chunks_may_end_anywhere() -> None:
    at = TIMINGS.index(b"64,") + 1
    chunked = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (at, TIMINGS[:at], len(TIMINGS) - at, TIMINGS[at:])
    assert tokens_of(chunked[-200:], len(chunked)) == Tokens(42, 64, 30, 40)


def test_a_stream_without_counts_is_estimated_by_its_events() -> None:
    event = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'
    assert tokens_of(event * 3, 3 * len(event)) == Tokens(answer=3)
    assert tokens_of((event * 5)[-100:], 1000 * len(event)).answer in range(950, 1051)


def test_a_stream_of_anthropics_counts_the_prompt_in_its_first_event() -> None:
    opening = (
        b'event: message_start\ndata: {"type":"message_start","message":{"content":[],'
        b'"usage":{"cache_read_input_tokens":4,"input_tokens":21,"output_tokens":0}}}\n\n'
    )
    word = (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"\\"message_delta\\""}}\n\n'
    )
    end = b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":40}}\n\n'
    whole = opening + word * 40 + end
    assert tokens_of(whole[-1536:], len(whole), opening) == Tokens(25, 40, 4)
    assert tokens_of(opening + word + end, len(opening + word + end), opening) == Tokens(25, 40, 4)
    left = opening + word * 2
    assert tokens_of(left, len(left), left) == Tokens(25, 3, 4)
    assert tokens_of(opening, len(opening), opening).prompt == 25


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    assert all(count >= 0 for count in msgspec.structs.astuple(tokens_of(data, len(data))))
