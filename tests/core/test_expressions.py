"""The regular expressions of the package, against a stranger's text. Each takes time in proportion to the text:
one that backtracks lets a client, a registry or a file stop the event loop with a few kilobytes."""

import ast
import importlib
import pkgutil
import re
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

import modelrunner
import modelrunner_diffusers
import modelrunner_llamacpp
import modelrunner_piper
import modelrunner_vllm
import modelrunner_whisper

_LONG = 20_000  # characters: a step for each pair of lines takes half a second, one for each of them some milliseconds
_MOST = 0.1  # seconds of the processor
_PACKAGES = (
    *(modelrunner, modelrunner_diffusers, modelrunner_llamacpp, modelrunner_piper),
    *(modelrunner_vllm, modelrunner_whisper),
)
_METHODS = frozenset(("match", "fullmatch", "search", "sub", "split", "findall", "finditer"))


def expressions() -> Iterator[tuple[str, re.Pattern[Any], str]]:
    """Yields the name of each expression at the top of a module, the expression, and each method it is used with."""
    for package in _PACKAGES:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.endswith("__main__"):
                continue
            module = importlib.import_module(found.name)
            assert module.__file__ is not None
            with open(module.__file__, encoding="utf-8") as file:
                tree = ast.parse(file.read())
            uses = {
                (node.value.id, node.attr)
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in _METHODS
            }
            for name, method in sorted(uses):
                if isinstance(pattern := getattr(module, name, None), re.Pattern):
                    yield f"{found.name}.{name}", pattern, method


def hostile(pattern: re.Pattern[Any]) -> Iterator[str]:
    """Yields long texts that nearly match: a beginning, a piece that repeats, and an end that does not fit."""
    literals = re.findall(r"[A-Za-z]{3,}[:=(]?", str(pattern.pattern))[:4]
    signs = sorted(set(re.findall(r"[^A-Za-z0-9]", str(pattern.pattern))))
    pieces = ["a", "0", " ", "a ", "0.", "\r\n", *signs, *(f"{sign}a" for sign in signs), *literals]
    starts = ["", '"', "0;", *literals]
    for start, piece, end in product(starts, pieces, ("", "\x01")):
        yield start + (piece * (_LONG // len(piece) + 1))[:_LONG] + end


@pytest.mark.parametrize(
    ("pattern", "method"),
    [pytest.param(pattern, method, id=f"{name}-{method}") for name, pattern, method in expressions()],
)
def test_no_expression_backtracks(pattern: re.Pattern[Any], method: str) -> None:
    use = getattr(pattern, method)
    for text in hostile(pattern):
        subject: Any = text.encode() if isinstance(pattern.pattern, bytes) else text
        began = time.process_time()
        match method:
            case "sub":
                use(subject[:0], subject)
            case "finditer":
                for _ in use(subject):
                    pass
            case _:
                use(subject)
        assert time.process_time() - began < _MOST, (text[:40], text[-10:])
