"""What a template's text says; and that no text keeps the daemon busy."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner import chattemplates
from modelrunner.chattemplates import abilities


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("", set()),
        ("{{ messages }}", {"chat"}),
        ("{% if tools %}{{ tools | tojson }}{% endif %}{{ message.tool_calls }}", {"chat", "tools"}),
        ("{%- if not tools is defined -%}{{ message['tool_calls'] }}", {"chat", "tools"}),
        ('{{ "}}" ~ tools }}{{ tool_calls }}', {"chat", "tools"}),
        ("{{ tools }}", {"chat"}),
        ("{# tools #}{{ 'tools' }}{{ \"tools\" }} tools {{ message.tools }}{{ tool_calls }}{{ my_tools }}", {"chat"}),
        ("{% if enable_thinking %}x{% endif %}", {"chat", "reasoning"}),
        ("{% if message['content'].split('</think>') %}", {"chat", "reasoning"}),
        ("I am thinking {{ messages }}", {"chat"}),
        ("{{ tool_calls, tools", {"chat", "tools"}),
    ],
)
def test_abilities(template: str, found: set[str]) -> None:
    assert abilities(template) == found


@given(st.text(alphabet="{}%#'\"\\ tols._\n", max_size=60))
def test_any_text_has_abilities(template: str) -> None:
    assert abilities(template) <= {"chat", "tools", "reasoning"}


def test_a_hostile_text_takes_no_longer_than_a_long_one() -> None:
    """Twice the text takes about twice the time; a search that begins anew at each sign would take four times."""

    def seconds(piece: str, size: int) -> float:
        text = piece * (size // len(piece))
        times = []
        for _ in range(3):
            began = time.process_time()
            abilities(text)
            times.append(time.process_time() - began)
        return min(times)

    for piece in ("{{", "{%'", "{{ '\\", "{#", "{{}", "{{'\\'", "{{ a.", "{"):
        small, large = (seconds(piece, chattemplates.LARGEST * factor) for factor in (1, 8))
        assert large < 24 * small + 0.01, piece
