"""The child process of engines that are Python packages, without the packages."""

import json
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelrunner_llamacpp import serve


class Kind(IntEnum):
    AUTO = -1
    ON = 1


@pytest.mark.parametrize(
    ("current", "value", "expected"),
    [
        (0, 5, 5),
        ("", "/m", "/m"),
        (False, True, True),
        (Kind.AUTO, "ON", Kind.ON),
        ([Kind.AUTO], ["ON"], [Kind.ON]),
        (set(), "name", {"name"}),
        (["127.0.0.1"], "/run/x.sock", ["/run/x.sock"]),
        ([0.0] * 4, [3.0, 1.0], [3.0, 1.0, 0.0, 0.0]),
    ],
)
def test_values_take_the_form_of_the_attribute(current: Any, value: Any, expected: Any) -> None:
    target = SimpleNamespace(inner=SimpleNamespace(field=current))
    serve.set_attribute(target, "inner.field", value)
    assert target.inner.field == expected


def test_a_name_that_the_engine_does_not_have_is_an_error() -> None:
    with pytest.raises(AttributeError):
        serve.set_attribute(SimpleNamespace(), "unknown", 1)
    with pytest.raises(KeyError):
        serve.fitted(Kind.AUTO, "OFF")


def test_runs_where_modelrunner_is_not_installed() -> None:
    """By path, isolated, with the standard library alone; the missing engine is named."""
    code = [sys.executable, "-I", "-S", str(Path(serve.__file__)), "xllamacpp", json.dumps({})]
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No module named 'xllamacpp'" in done.stderr
