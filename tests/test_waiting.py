"""No test fails because the machine is busy: none asserts seconds of a real clock, and every wait has one limit."""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter"}
CLIENTS = {"Client", "AsyncClient"}
WAITS = {"timeout", "wait_for", "wait", "join", "communicate", "fetch", "run", "result", "HTTPTransport"} | CLIENTS
SHORT = 5.0
"""Seconds. A shorter wait is over before what it waits for comes: it is meant to find nothing."""


def offences(tree: ast.AST) -> list[str]:
    """The lines that compare a real clock within an assertion, or that limit a wait to some seconds of their own."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and any(name_of(inner) in CLOCKS for inner in ast.walk(node.test)):
            found.append(f"line {node.lineno} asserts about a clock")
        if isinstance(node, ast.Call) and name_of(node.func) in WAITS:
            given = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            found += [
                f"line {node.lineno} waits {value} s" for value in map(number, [*given, *node.args]) if value >= SHORT
            ]
            if not given and is_of_httpx(node.func):
                found.append(f"line {node.lineno} waits the 5 s that httpx has by default")
    return found


def is_of_httpx(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and name_of(node.value) == "httpx" and node.attr in CLIENTS


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def number(node: ast.AST) -> float:
    return float(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else 0.0


FILES = sorted(path.relative_to(HERE).as_posix() for path in HERE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_no_test_depends_on_seconds(file: str) -> None:
    assert offences(ast.parse((HERE / file).read_text())) == []


@pytest.mark.parametrize(
    "line",
    [
        *("assert time.monotonic() - began < 3", "assert perf_counter() < end"),
        *("process.wait(30)", "fetch(x, timeout=10)", "httpx.Client(transport=x)", "httpx.AsyncClient()"),
    ],
)
def test_what_depends_on_seconds_is_found(line: str) -> None:
    assert len(offences(ast.parse(line))) == 1
