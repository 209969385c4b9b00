"""What is taken out of bodies that are recorded."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.telemetry.redaction import redacted

OURS = "mr-" + "aB3_-" * 8 + "xyz"


@pytest.mark.parametrize(
    "secret",
    [
        OURS,
        "sk-proj-abcdefghijklmnop1234",
        "hf_abcdefghijklmnopqrstuvwx",
        "ghp_abcdefghijklmnopqrstuvwx",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def",
        "-----BEGIN PRIVATE KEY-----\nMIIEvQ==\n-----END PRIVATE KEY-----",
    ],
)
@pytest.mark.parametrize("form", ["{}", '{{"messages": [{{"content": "it is {} here"}}]}}', "data: it is {}\n\n"])
def test_keys(secret: str, form: str) -> None:
    escaped = json.dumps(secret)[1:-1] if form.startswith("{{") else secret
    text, count = redacted(form.format(escaped))
    assert secret not in text
    assert escaped not in text
    assert count == 1


@pytest.mark.parametrize("name", ["api_key", "X-Api-Key", "authorization", "openai_api_key", "password"])
@pytest.mark.parametrize("form", ['{{"{}": "{}"}}', 'data: {{"{}": "{}"}}\n'])
def test_secrets_by_their_name(name: str, form: str) -> None:
    text, count = redacted(form.format(name, "hunter22"))
    assert ("hunter22" in text, count) == (False, 1)


@pytest.mark.parametrize("name", ["max_tokens", "token", "secretary", "keyboard"])
def test_other_members_stay(name: str) -> None:
    text = json.dumps({name: "value"})
    assert redacted(text) == (text, 0)


def test_files() -> None:
    image = "iVBORw0KGgo" * 20
    for url in (f"data:image/png;base64,{image}", f"data:image\\/png;base64,{image}", f"data:x;base64,{image}"):
        text, count = redacted(f'{{"url": "{url}"}}')
        assert image not in text
        assert count == 1
        assert "redacted" in json.loads(text)["url"]
        cut, _ = redacted(f'{{"url": "{url}'[:-3])  # the middle of a body
        assert image[:30] not in cut
    assert redacted(json.dumps({"data": "A" * 600}))[1] == 1
    assert redacted(json.dumps({"text": "a dataset: 5, and data: that"}))[1] == 0


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_stays_json(value: object) -> None:
    text = json.dumps(value)
    found, count = redacted(text)
    assert (found == text) is (count == 0)
    json.loads(found)


@given(st.text())
def test_any_text(text: str) -> None:
    found, _ = redacted(text + OURS)
    assert OURS not in found


def test_deep_nesting() -> None:
    text, _ = redacted("[" * 900 + f'"{OURS}"' + "]" * 900)
    assert OURS not in text
