"""The comparison behind `scripts/llama-server-tests`."""

import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "scripts/llamaservertests"


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("compare")


def report(compare: Any, **daemon: Any) -> int:
    direct = dict.fromkeys(daemon, compare.Case("passed", "", (), ()))
    code: int = compare._report(direct, daemon, whole=False)
    return code


def test_a_difference_without_a_rule_fails(compare: Any, capsys: pytest.CaptureFixture[str]):
    assert report(compare, new=compare.Case("failed", "assert 1 == 2", (), ())) == 1
    printed = capsys.readouterr().out
    assert "1 did not: OURS" in printed
    assert "assert 1 == 2" in printed


def test_a_refused_option_and_a_missing_route_are_explained(compare: Any, capsys: pytest.CaptureFixture[str]):
    option = compare.Case("failed", "", ("--api-key",), ("GET /slots",))
    route = compare.Case("failed", "", (), ("GET /slots",))
    assert report(compare, option=option, route=route) == 0
    printed = capsys.readouterr().out
    assert "1 did not: option not taken" in printed
    assert "1 did not: route not exposed" in printed


def test_a_route_that_no_rule_names_fails(compare: Any):
    assert report(compare, new=compare.Case("failed", "", (), ("GET /v1/models",))) == 1


def test_a_case_that_cannot_run_on_a_side_is_no_difference(compare: Any):
    assert report(compare, absent=compare.Case("skipped", "no model", (), ())) == 0
