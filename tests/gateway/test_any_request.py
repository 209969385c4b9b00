"""Whatever JSON a client sends is read or refused in words, in a time and a memory that its length bounds. Each test
prints its figures (`-rP`)."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.dialects.anthropic_request import MessageRequest, has_other_content
from modelrunner.gateway.dialects.normalize import lenient, normalized
from modelrunner.gateway.dialects.responses_request import ResponseFields
from modelrunner.gateway.request.schemas import hold_schemas
from modelrunner.gateway.routes import match
from tests.fuzzing import Figures

PATHS = [
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/detokenize", "/v1/responses"),
    *("/v1/messages", "/v2/rerank", "/api/chat", "/api/generate", "/api/embed"),
]
WORDS = st.sampled_from(
    (
        *("user", "assistant", "system", "tool", "text", "function", "function_call", "item_reference", "required"),
        *("auto", "enabled", "disabled", "image", "tool_use", "tool_result", "json_schema", "high", "a"),
    )
)
INNER = st.sampled_from(
    (
        *("role", "content", "type", "text", "name", "id", "function", "arguments", "tool_calls", "input", "schema"),
        *("json_schema", "parameters", "properties", "pattern", "required", "effort", "format", "call_id", "source"),
    )
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS | WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(INNER, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("path", PATHS)
def test_any_body_of_a_family_is_read_or_refused(path: str) -> None:
    route = match(path)
    assert route is not None
    dialect: Any = route.dialect
    names = [name for name in dialect.decoder.type.__struct_fields__ if name != "model"]
    more = st.sampled_from([*names, "messages", "tools", "input", "response_format", "system"])

    def read(body: bytes) -> None:
        refused = None
        try:
            found = dialect.read(body)
            if isinstance(found, ResponseFields):
                found.chat([])
            if path == "/v1/messages":
                has_other_content(body)
                MessageRequest.of(body).chat()
            hold_schemas(normalized("/v1/chat/completions", body), {"not"})
        except ModelRunnerError as error:
            refused = error
        assert refused is None or (400 <= refused.status < 500 and refused.message)

    figures = Figures()

    @given(st.dictionaries(more, VALUES, max_size=6))
    def check(fields: dict[str, Any]) -> None:
        body = msgspec.json.encode({"model": "m"} | fields)
        figures.take(lambda: read(body), len(body))

    check()
    print(figures)


@given(VALUES)
def test_a_normal_form_is_normal(value: Any) -> None:
    body = msgspec.json.encode({"model": "m", "messages": value})
    once = normalized("/v1/chat/completions", body).encoded()
    assert normalized("/v1/chat/completions", once).encoded() == once
    assert lenient(lenient(body)) == lenient(body)
