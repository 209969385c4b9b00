"""Token counts, read from the end of real answers."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.gateway.tokens import NONE, Tokens, tokens_of

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
    assert tokens_of(ANTHROPIC, len(ANTHROPIC)) == Tokens(9, 7, 3, 0)
    assert tokens_of(TIMINGS, len(TIMINGS)) == Tokens(42, 64, 30, 40)


def test_an_answer_that_talks_about_usage_is_not_counted() -> None:
    said = rb'{"content":"say \"usage\": \"prompt_tokens\": 999 and \"completion_tokens\": 9"}'
    assert tokens_of(said, len(said)) is NONE


def test_chunks_may_end_anywhere() -> None:
    at = TIMINGS.index(b"64,") + 1
    chunked = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (at, TIMINGS[:at], len(TIMINGS) - at, TIMINGS[at:])
    assert tokens_of(chunked[-200:], len(chunked)) == Tokens(42, 64, 30, 40)


def test_a_stream_without_counts_is_estimated_by_its_events() -> None:
    event = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'
    assert tokens_of(event * 3, 3 * len(event)) == Tokens(answer=3)
    assert tokens_of((event * 5)[-100:], 1000 * len(event)).answer in range(950, 1051)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    assert all(count >= 0 for count in msgspec.structs.astuple(tokens_of(data, len(data))))
