"""Which fields of a request llama.cpp ignores, and which of those make the request one that it cannot serve."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelrunner import BadRequest, Mode, ModelHeader, RunSpec
from modelrunner_llamacpp.requests import ignored
from tests.llamacpp.models import SMOLLM2, bundle, spec

TOOLS = [{"type": "function", "function": {"name": "f"}}]
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
KNOWING = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN


def run_of(template: str | None, *flags: str) -> RunSpec:
    made = spec(bundle(SMOLLM2), mode=Mode.COMPLETION)
    header = ModelHeader(SMOLLM2 | ({"tokenizer.chat_template": template} if template else {}), ())
    return replace(made, bundle=replace(made.bundle, header=header), flags=flags)


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


def test_a_template_that_is_packaged_with_the_model_counts(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(KNOWING)
    plain = run_of(PLAIN)
    files = {**plain.bundle.files, "chat_template.jinja": tmp_path / "chat_template.jinja"}
    made = replace(plain, bundle=replace(plain.bundle, files=files))
    assert not ignored(made, {"tools": TOOLS, "tool_choice": "required"})
