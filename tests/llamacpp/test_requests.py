"""Which fields of a request llama.cpp ignores, and which of those make the request one that it cannot serve."""

from dataclasses import replace
from typing import Any

import pytest

from modelrunner import chattemplates
from modelrunner.errors import BadRequest
from modelrunner.types import Mode, RunSpec
from modelrunner_llamacpp.requests import ignored
from tests.llamacpp.models import SMOLLM2, bundle, spec

TOOLS = [{"type": "function", "function": {"name": "f"}}]
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
KNOWING = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].tool_calls }}" + PLAIN


def run_of(template: str | None, *flags: str) -> RunSpec:
    made = spec(bundle(SMOLLM2), mode=Mode.COMPLETION)
    capabilities = made.bundle.capabilities | chattemplates.abilities(template or "")
    return replace(made, bundle=replace(made.bundle, capabilities=capabilities), flags=flags)


@pytest.mark.parametrize(
    ("template", "fields", "found"),
    [
        (PLAIN, {"tools": TOOLS}, ["tools"]),
        (None, {"tools": TOOLS, "tool_choice": "auto"}, ["tools"]),
        (PLAIN, {"tools": TOOLS, "tool_choice": {"type": "auto"}}, ["tools"]),
        (PLAIN, {"tools": TOOLS, "tool_choice": "none"}, []),
        (PLAIN, {"tools": TOOLS, "tool_choice": {"type": "none"}}, []),
        (PLAIN, {"tools": []}, []),
        (KNOWING, {"tools": TOOLS, "tool_choice": "required"}, []),
        (PLAIN, {"return_documents": True}, ["return_documents"]),
        (PLAIN, {"return_documents": False}, []),
        (PLAIN, {"dimensions": 576}, []),
    ],
)
def test_fields_that_are_ignored(template: str | None, fields: dict[str, Any], found: list[str]) -> None:
    assert list(ignored(run_of(template), fields)) == found


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}, {"type": "any"}])
def test_a_tool_that_must_be_called_needs_a_template(choice: object) -> None:
    for template, *flags in ((PLAIN,), (None,), (KNOWING, "--chat-template", "chatml")):
        with pytest.raises(BadRequest, match="--chat-template") as caught:
            ignored(run_of(template, *flags), {"tools": TOOLS, "tool_choice": choice})
        assert caught.value.param == "tool_choice"


def test_embeddings_have_their_own_length() -> None:
    with pytest.raises(BadRequest, match="take all 576") as caught:
        ignored(run_of(None), {"dimensions": 64})
    assert caught.value.param == "dimensions"
