"""What is taken out of bodies that are recorded."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.telemetry.redaction import redacted
from tests.cost import cost

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


NAMES = ["api_key", "X-Api-Key", "authorization", "openai_api_key", "password", "db_password", "pwd", "passphrase"]
NAMES += ["api_token", "accessToken", "client_secret", "secret_key", "secretAccessKey", "private_key"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("form", ["{}", "data: {}\n\ndata: [DONE]\n\n", "{}\n", "{}…"])
def test_secrets_by_their_name(name: str, depth: int, form: str) -> None:
    """Also where JSON stands in a text of JSON, as the arguments of a call do; in streams, and in what was cut off."""
    value: object = {name: "hunter22", "user": 'k"im'}
    for _ in range(depth):
        value = {"function": {"name": "login", "arguments": json.dumps(value)}}
    text, count = redacted(form.format(json.dumps(value)))
    assert ("hunter22" in text, count) == (False, 1)
    if form == "{}":
        found = json.loads(text)
        for _ in range(depth):
            found = json.loads(found["function"]["arguments"])
        assert found == {name: "[redacted]", "user": 'k"im'}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_secret_in_the_part_of_a_body_that_is_kept(depth: int) -> None:
    value: object = {"text": "x", "password": 'hunter22 "and more\n'}
    if depth:
        value = {"arguments": json.dumps(value)}
    whole = json.dumps(value)
    for end in range(whole.index("hunter") + 1, len(whole)):
        text, _ = redacted(whole[:end])
        assert not re.search("hunter|and", text), whole[:end]


@pytest.mark.parametrize(
    "text",
    [
        "export AWS_SECRET_ACCESS_KEY=PLANTED/K7MDENG/bPxRfiCY",
        "GITHUB_TOKEN='PLANTEDabcdefgh'",
        "password=PLANTED1 ok",
        "https://host/path?user=kim&api_key=PLANTED1&x=1",
        "postgres://kim:PLANTED@host:5432/db",
        "redis://:PLANTED@host",
    ],
)
@pytest.mark.parametrize("form", ["{}", '{{"messages": [{{"content": "it is {} here"}}]}}', "data: {}\n\n"])
def test_secrets_in_a_text(text: str, form: str) -> None:
    found, count = redacted(form.format(text))
    assert ("PLANTED" in found, count) == (False, 1)
    for word in ("kim", "host", "user", "x=1", "ok", "export"):
        assert (word in text) == (word in found)


def test_a_token_is_secret_unless_it_is_the_models() -> None:
    text = "an-unusually-long-token"
    assert redacted(json.dumps({"token": text})) == ('{"token":"[redacted]"}', 1)
    for plain in ({"token": text, "logprob": -0.5}, {"token": " the"}, {"eos_token": "</s>"}):
        assert redacted(json.dumps(plain))[1] == 0


def test_text_that_only_looks_so_stays() -> None:
    for text in (
        "http://localhost:8080/a@b",
        "the password: it is in the safe",
        "max_tokens=100 keyboard=qwertz12",
        "at 10:30, kim@example.org",
        "if password == wanted:",
    ):
        assert redacted(text) == (text, 0)
        assert redacted(json.dumps({"content": text}))[1] == 0


@pytest.mark.parametrize(
    "piece",
    ["a-", '"password":"', "password=", "://a:", '\\"password\\": \\"', "[", "{", '{"a":"{', "data: {", "_key", '"\\"'],
)
def test_the_work_grows_with_the_text(piece: str) -> None:
    def search(size: int) -> float:
        return cost(lambda: redacted(piece * (size // len(piece))))

    assert search(160_000) < 40 * search(20_000) + 40


@pytest.mark.parametrize("word", ["a" * 511, "eyJ-" * 127, "/" * 511, "\\/" * 511, "\\/a" * 255])
def test_words_that_are_nearly_files_cost_little_more_than_others(word: str) -> None:
    def search(word: str) -> float:
        return cost(lambda: redacted(word * (200_000 // len(word))))

    assert search(f"{word} ") < 6 * search("a" * 15 + " ") + 6


def test_files() -> None:
    image = "iVBORw0KGgo" * 20
    for url in (f"data:image/png;base64,{image}", f"data:image\\/png;base64,{image}", f"data:x;base64,{image}"):
        text, count = redacted(f'{{"url": "{url}"}}')
        assert image not in text
        assert count == 1
        assert "redacted" in json.loads(text)["url"]
        cut, _ = redacted(f'{{"url": "{url}'[:-3])  # the middle of a body
        assert image[:30] not in cut
    for before in ("\\n", "\\/", "\\\\", "\\\\\\/", "a\\/\\/", ""):  # the escapes of JSON in the middle of a body
        assert "A" * 9 not in redacted(f'"x": "{before}' + "A" * 600)[0], before
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
