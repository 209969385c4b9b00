"""Modelfiles: what is read, and that no text does anything worse than a sentence with its line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.errors import BadRequest
from modelrunner.modelfile import Modelfile, parse, render

WHOLE = '''
# comment
from ./model.gguf
PARAMETER temperature 0.5
parameter stop "<|end|>"
PARAMETER stop AND
PARAMETER num_ctx 4096
TEMPLATE """{% for m in messages %}{{ m.content }}
{% endfor %}"""
SYSTEM "You are kind."
ADAPTER ./lora.gguf
MESSAGE user Is this "quoted"?
MESSAGE assistant """yes
no"""
MESSAGE user """ "so" """
LICENSE """
MIT
"""
'''


def test_everything_that_a_modelfile_may_have() -> None:
    assert parse(WHOLE) == Modelfile(
        "./model.gguf",
        "You are kind.",
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        {"temperature": 0.5, "stop": ["<|end|>", "AND"], "num_ctx": 4096},
        ("./lora.gguf",),
        ("\nMIT\n",),
        (("user", 'Is this "quoted"?'), ("assistant", "yes\nno"), ("user", ' "so" ')),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no FROM"),
        ("FROM", "line 1: FROM has no value"),
        ("FROM a\nFROM b", "line 2: FROM stands twice"),
        ("FROM a\n\nEVIL x", "line 3: unknown instruction 'EVIL'"),
        ('FROM a\nSYSTEM """x', "line 2: the three quotation marks"),
        ('FROM a\nSYSTEM """x""" y', "line 2: there is 'y' after"),
        ("FROM a\nPARAMETER temperature hot", "line 2: the parameter temperature must be a number"),
        ("FROM a\nPARAMETER stop", "line 2: PARAMETER needs a name and a value"),
        ("FROM a\nMESSAGE robot hi", "line 2: a message has the role"),
        ("FROM a\nTEMPLATE {{ .Prompt }}", "line 2: the template is in Go's language"),
        ("FROM a\nTEMPLATE {{- if .System }}", "line 2: the template is in Go's language"),
    ],
)
def test_a_mistake_is_told_with_its_line(text: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said.replace("'", ".").replace("(", ".")):
        parse(text)


@given(st.text(st.sampled_from('FROMSYTE MPLAagc#"\n\t ./{}-0')) | st.text())
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        made = parse(text)
    except BadRequest:
        return
    assert made.base


# A line of a file may end in CR LF, and three quotation marks end a value.
LINES = st.text(st.characters(codec="utf-8", exclude_characters='"\r\n'))
TEXTS = st.lists(LINES, min_size=1).map("\n".join)
WORD = st.text(st.characters(min_codepoint=33, max_codepoint=126, blacklist_characters='"#'), min_size=1)


@given(
    st.builds(
        Modelfile,
        base=WORD,
        system=st.none() | TEXTS,
        parameters=st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.floats(0, 2),
                "top_k": st.integers(-1, 100),
                "num_ctx": st.integers(1, 1 << 20),
                "stop": st.lists(TEXTS.filter(bool), min_size=1),
            },
        ),
        licences=st.lists(TEXTS.filter(bool), max_size=3).map(tuple),
        messages=st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS), max_size=3).map(tuple),
    )
)
def test_a_rendered_modelfile_reads_as_the_same(modelfile: Modelfile) -> None:
    assert parse(render(modelfile)) == modelfile
