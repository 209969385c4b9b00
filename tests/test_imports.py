"""Imports go one way: what each part may use of the others, read from the source and not from what happens to be
loaded."""

import ast
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "modelrunner"

# The values, errors and helpers that everybody may use.
SHARED = {
    *("modelrunner", "boundedjson", "chattemplates", "concurrency", "database", "durable", "errors", "lora", "types"),
    *("aliases", "defaults", "engineapi", "jsonfile", "modelformat", "modelfile", "progress", "sandbox", "schema"),
    *("rotatedfile", "units"),
}
# Part -> what else it may use, as docs/architecture.md draws it. A part is a subpackage or a module of the package.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"client"},
    "__main__": {"cli"},
    "aliases": set(),
    "api": {
        "batches",
        "cluster",
        "gateway",
        "http",
        "keys",
        "models",
        "openapi",
        "plugins",
        "scheduler",
        "store",
        "telemetry",
        "tools",
        "ui",
        "web",
        "wire",
    },
    "backend": set(),
    "batches": {"gateway", "http", "keys"},
    "boundedjson": set(),
    "chattemplates": set(),
    "client": {"cli", "config", "wire"},
    "defaults": set(),
    "modelfile": set(),
    "modelformat": set(),
    "cli": {"config", "daemon", "oci", "wire"},
    "cluster": {"backend", "engine", "models", "plugins", "scheduler", "store", "wire"},
    "concurrency": set(),
    "config": set(),
    "daemon": {
        "sdk",
        *(
            "api",
            "backend",
            "batches",
            "cluster",
            "config",
            "gateway",
            "http",
            "keys",
            "models",
            "oci",
            "plugins",
            "processes",
            "pull",
        ),
        *("scheduler", "store", "telemetry", "tools", "wire"),
    },
    "database": set(),
    "durable": set(),
    "engineapi": set(),
    "engine": {"backend", "http", "plugins", "processes"},
    "errors": set(),
    "gateway": {"engine", "http", "keys", "scheduler"},
    "keys": set(),
    "http": set(),
    "jsonfile": set(),
    "lora": set(),
    # The daemon's operations: no HTTP, so that every front end can stand on them.
    "models": {"backend", "config", "oci", "plugins", "pull", "scheduler", "store", "wire"},
    "oci": {"store", "web"},
    "openapi": {"gateway", "wire"},
    "plugins": {"backend", "config", "processes"},
    "processes": set(),
    "progress": set(),
    "pull": {"oci", "store", "web", "wire"},
    "scheduler": {"backend", "engine", "plugins", "processes"},
    "rotatedfile": set(),
    "sandbox": set(),
    "schema": set(),
    "sdk": {"backend", "engine", "processes", "web"},
    "store": {"config"},
    "telemetry": {"engine", "gateway", "http", "scheduler", "wire"},
    "testing": {"backend", "engine", "plugins", "processes", "store"},
    "tools": {"processes"},
    "types": set(),
    "ui": set(),
    "units": set(),
    "web": set(),
    "wire": set(),
}
# Modules of config/ that other parts may use: values and names of places. The settings themselves are handed down.
PLACES = {"modelrunner.config.locations", "modelrunner.config.lockfile", "modelrunner.config.modelconfig"}
# What a backend may use.
PUBLIC = {"modelrunner.sdk", "modelrunner.durable", "modelrunner.units"}


@cache
def imported(file: Path) -> frozenset[tuple[str, str]]:
    """(module, name) of every import in the file, wherever it stands; the name is "" for a plain import."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                found |= {(alias.name, "") for alias in names}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found |= {(module, alias.name) for alias in names}
            case ast.ImportFrom(level=level) if level:
                raise AssertionError(f"{file}: imports are absolute here")
    return frozenset(found)


def parts(file: Path) -> set[str]:
    """The parts of modelrunner that the file imports."""
    found = set()
    for module, name in imported(file):
        first, _, rest = module.partition(".")
        if first == "modelrunner":
            inside = rest.partition(".")[0] or name
            found.add(inside if (PACKAGE / inside).is_dir() or (PACKAGE / f"{inside}.py").exists() else "modelrunner")
    return found


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


SOURCES = sorted(PACKAGE.rglob("*.py"))
BACKENDS = sorted((ROOT / "backends").rglob("*.py"))


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_every_part_has_its_row() -> None:
    assert {part_of(file) for file in SOURCES} == set(ALLOWED)


def test_the_map_shows_every_part() -> None:
    """docs/architecture.md has the tree of parts."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = text.partition("```\nmodelrunner/\n")[2].partition("\nbackends/")[0]
    shown = {word.rstrip("/") for line in tree.splitlines() for word in line[:34].split()}
    assert {part.removesuffix("/") for part in ALLOWED if not part.startswith("__")} <= shown


def test_the_map_names_what_exists() -> None:
    """Its paths are files and folders of the repository, and its scripts are all that a person can run."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = {path.name for folder in ("modelrunner", "backends", "tests") for path in (ROOT / folder).rglob("*.py")}
    named = set(re.findall(r"`([\w./-]+(?:\.py|\.md|/))`", text))
    assert {"plan.py", "store/store.py", "pull/"} <= named
    assert not {
        name
        for name in named
        if not (name in files or any((base / name).exists() for base in (ROOT, PACKAGE, ROOT / "tests")))
    }
    scripts = re.sub(r"\s", "", text.partition("\nscripts/")[2].partition("```")[0]).split(",")
    assert sorted(scripts) == sorted(path.name for path in (ROOT / "scripts").iterdir() if _is_program(path))


@pytest.mark.parametrize("page", ["architecture.md", "scheduling.md"])
def test_the_pages_name_no_class_or_function_that_is_gone(page: str) -> None:
    named = set(re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)`", (ROOT / "docs" / page).read_text()))
    folders = [ROOT / name for name in ("modelrunner", "backends", "tests", "scripts")]
    sources = [path for folder in folders for path in folder.rglob("*.py")] + [ROOT / "pyproject.toml"]
    words = {word for path in sources for word in re.findall(r"\w+", path.read_text())}
    files = {path.stem for path in sources}
    assert "plan" in words
    assert not {name for name in named if not set(name.removesuffix(".py").split(".")) <= words | files | {"md"}}


def _is_program(path: Path) -> bool:
    return path.is_file() and not path.suffix


def test_imports_go_one_way() -> None:
    beyond = {name_of(file): parts(file) - SHARED - ALLOWED[part_of(file)] - {part_of(file)} for file in SOURCES}
    assert not {name: found for name, found in beyond.items() if found}


def test_no_two_parts_use_each_other() -> None:
    """The table itself has no circle."""
    order: list[str] = []

    def visit(part: str, above: tuple[str, ...]) -> None:
        assert part not in above, f"a circle: {' -> '.join((*above, part))}"
        for below in ALLOWED[part] - {part}:
            visit(below, (*above, part))
        order.append(part)

    for part in ALLOWED:
        visit(part, ())


def class_names(files: Iterable[Path]) -> list[str]:
    """The names of all classes, wherever they stand; a private class counts under its name without the underscore."""
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return [node.name.lstrip("_") for node in nodes if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in (ROOT / "backends").glob("*/__init__.py")))
def test_a_class_name_stands_for_one_thing(folder: str) -> None:
    """In the package and one backend together: the backends name their like parts alike."""
    names = Counter(class_names([*SOURCES, *(ROOT / "backends" / folder).rglob("*.py")]))
    assert not {name for name, times in names.items() if times > 1}


def test_the_plan_knows_nothing_but_values() -> None:
    """Nor does anything that it is made of."""
    waiting, seen = ["plan"], set[str]()
    while waiting:
        seen.add(name := waiting.pop())
        file = PACKAGE / "scheduler" / f"{name}.py"
        assert parts(file) <= {"errors", "types", "units", "scheduler"}, name
        own = {f"{module}.{what}".split(".")[2] for module, what in imported(file) if ".scheduler" in module}
        waiting += own - seen


def test_settings_are_read_by_the_command_line_and_where_the_daemon_is_made() -> None:
    users = {
        name_of(file)
        for file in SOURCES
        if part_of(file) not in ("cli", "config")
        for module, name in imported(file)
        if module == "modelrunner.config.settings" or (module, name) == ("modelrunner.config", "settings")
    }
    assert users <= {f"modelrunner/daemon/{name}.py" for name in ("app", "hostmode", "parts")}
    others = {
        (name_of(file), f"{module}.{name}" if module == "modelrunner.config" else module)
        for file in SOURCES
        if part_of(file) not in ("cli", "config", "daemon")
        for module, name in imported(file)
        if module.startswith("modelrunner.config")
    }
    assert {module for _, module in others} <= PLACES


def test_only_routes_and_the_daemon_know_a_web_framework() -> None:
    users = {
        part_of(file) for file in SOURCES if any(module.split(".")[0] == "aiohttp" for module, _ in imported(file))
    }
    assert users <= {"api", "cluster", "daemon"}


def test_backends_use_the_public_names() -> None:
    used = {
        (name_of(file), f"{module}.{name}" if module == "modelrunner" else module)
        for file in BACKENDS
        for module, name in imported(file)
        if module.split(".")[0] == "modelrunner"
    }
    assert not {
        (file, module) for file, module in used if module not in PUBLIC and not module.startswith("modelrunner.sdk.")
    }


def test_nothing_imports_a_backend() -> None:
    backends = {folder.name for folder in (ROOT / "backends").iterdir()}
    used = {(name_of(file), module.split(".")[0]) for file in SOURCES for module, _ in imported(file)}
    assert not {(file, module) for file, module in used if module in backends}


def test_the_daemon_stays_light() -> None:
    """What only one command or source needs is imported on first use; numbers and tensors never."""
    heavy = {"numpy", "torch", "pip", "rich", "prompt_toolkit", "llama_cpp", "vllm"}
    for file in SOURCES:
        if part_of(file) != "cli":
            top = ast.parse(file.read_text()).body
            plain = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
            named = {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
            assert not {name.split(".")[0] for name in plain | named} & heavy, name_of(file)


@pytest.mark.parametrize("word", ["extractall", "extract", "unpack_archive"])
def test_no_archive_is_unpacked_under_names_of_its_own(word: str) -> None:
    """Names in archives are only read: what is taken is written under names of ours (`store/tar.py`)."""
    called = {
        name_of(file): node.lineno
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == word
    }
    assert called == {}
