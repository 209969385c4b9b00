"""No struct's type information is left to be built by threads that decode it for the first time at once."""

import ast
import builtins
import gc
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import modelrunner
from modelrunner.daemon import shapes

PACKAGE = Path(modelrunner.__file__).parent
# Struct types as the daemon loads them, and those that still have no type information: a struct that msgspec has
# prepared refers to it.
PREPARED = """
import gc
import modelrunner.daemon.app
from modelrunner.daemon import shapes
def unprepared():
    kinds = (struct for struct in shapes.structs() if struct.__module__.startswith("modelrunner"))
    return [k for k in kinds if not any(type(r).__name__ == "StructInfo" for r in gc.get_referents(k))]
before = len(unprepared())
shapes.prime()
for struct in shapes.structs():
    print(f"{struct.__module__}.{struct.__qualname__}")
assert before > 20, "most structs have nothing at the start"
assert unprepared() == [], unprepared()
"""


def defined() -> set[str]:
    """Every struct in the source of the package but those of the command line, which has one thread."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(("modelrunner", *file.relative_to(PACKAGE).with_suffix("").parts))
        if module.startswith(("modelrunner.cli.", "modelrunner.client")):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "msgspec.Struct" for base in node.bases):
                found.add(f"{module}.{node.name}")
    return found


def test_every_struct_is_prepared_before_the_daemon_serves() -> None:
    done = subprocess.run([sys.executable, "-c", PREPARED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with_a_cluster = {name for name in defined() if name.startswith("modelrunner.cluster.")}
    assert defined() - with_a_cluster <= set(done.stdout.split())


def test_the_daemon_prepares_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from modelrunner.daemon import parts
    from tests.api.conftest import make_settings

    class Late(msgspec.Struct):
        """A struct that only a plug-in brings."""

    settings = make_settings(tmp_path)
    settings.data_dir.mkdir()
    monkeypatch.setattr(parts, "add_calls", lambda calls: None)  # which would stay for later tests of this process
    parts.build(settings).registry.close()
    assert any(type(found).__name__ == "StructInfo" for found in gc.get_referents(Late))
    assert Late in set(shapes.structs())


def test_what_is_decoded_is_a_struct_or_plain() -> None:
    """Type information of dataclasses and the like is built at first use, too: they need a decoder of their own."""
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(("modelrunner", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and (kind := decoded_type(node)):
                scope = vars(importlib.import_module(name))
                for word in (n.id for n in ast.walk(kind) if isinstance(n, ast.Name)):
                    found = scope.get(word, vars(builtins).get(word))
                    parameter = found is None  # of a function whose callers name the struct
                    assert parameter or is_safe(found), f"{file}:{node.lineno} decodes a {word}"


def decoded_type(call: ast.Call) -> ast.expr | None:
    match ast.unparse(call.func):
        case "msgspec.convert":
            return call.args[1]
        case "msgspec.json.decode" | "msgspec.msgpack.decode":
            return next((keyword.value for keyword in call.keywords if keyword.arg == "type"), None)
    return None


def is_safe(kind: object) -> bool:
    if args := get_args(kind):
        return all(map(is_safe, args))
    return kind in (Any, dict, list, frozenset, str, bytes, int, msgspec) or (
        isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    )
