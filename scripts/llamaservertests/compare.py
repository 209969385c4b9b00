"""`scripts/llama-server-tests`: runs the tests on both sides and compares the results.

The tests come from the archive whose source the daemon's own build of llama.cpp uses, and run in a temporary copy.
`harness.py` stands between them and the server, as a plugin of pytest."""

import argparse
import asyncio
import fnmatch
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import standin

from modelrunner.config.locations import Locations
from modelrunner.pull import Puller
from modelrunner.pull.file import LocalFiles
from modelrunner.store import Store
from modelrunner_llamacpp.build import fetch_source
from modelrunner_llamacpp.engines import SOURCE_TREE, SOURCE_VERSION
from modelrunner_llamacpp.environment import BOUND
from tests.models.prepare import SMOLLM2, ignore, prepared

HERE = Path(__file__).resolve().parent
TESTS = "tools/server/tests"
SIDES = ("direct", "daemon")
UNPACKED = (TESTS, "models/templates")
UNEXPLAINED = "OURS"


@dataclass(frozen=True)
class Case:
    """A test's result on one side. `outcome` is passed, failed or skipped. `refused` are the options that the daemon
    refused, `missing` the routes that it does not have, as far as the test met them."""

    outcome: str
    message: str
    refused: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """Why a case passes directly alone."""

    kind: str
    reason: str


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*")
    parser.add_argument("-k", default="", metavar="EXPRESSION")
    parser.add_argument("--results", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    cache = Locations.find().cache
    engine = next(cache.glob(f"llama.cpp-native-{SOURCE_VERSION}-*/bin/llama-server"), None)
    if engine is None:
        print("the native engine is not here: run `scripts/install-engine --build`", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="llamatests") as place:
        results = (asked.results or Path(place) / "results").absolute()
        results.mkdir(parents=True, exist_ok=True)
        tests = _unpack(_archive(cache), Path(place)) / TESTS
        data = _models(Path(place))
        chosen = [*([f"unit/{name}" for name in asked.files] or ["unit"]), "-k", asked.k]
        running = [_start(side, tests, data, engine, results, chosen) for side in SIDES]
        for process in running:
            process.wait()
        direct, daemon = (dict(_cases(results / f"{side}.xml")) for side in SIDES)
    return _report(direct, daemon, whole=not (asked.files or asked.k))


def _archive(cache: Path) -> Path:
    """Returns the archive of llama-cpp-python, downloaded once for each version and verified by its digest."""
    place = cache / f"llama.cpp-source-{SOURCE_VERSION}"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            asyncio.run(fetch_source(Path(scratch) / "source", Path(scratch) / "log"))
            (Path(scratch) / "source").rename(place)
    return next(place.glob("*.tar.gz"))


def _unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        wanted = tuple(f"{SOURCE_TREE}/{part}/" for part in UNPACKED)
        tar.extractall(folder, [member for member in tar if member.name.startswith(wanted)], filter="data")
    return folder / SOURCE_TREE


def _models(place: Path) -> Path:
    """Returns a data directory in `place` with the models of the tests and a small one."""
    data = place / "data"
    shutil.copytree(
        prepared(), data, copy_function=os.link, ignore=shutil.ignore_patterns("daemon.lock", "logs", "state")
    )
    store = Store(data)
    standin.write(place / "small.gguf", store.bundle(SMOLLM2).model_file)
    asyncio.run(Puller(store).pull(LocalFiles(place / "small.gguf"), ignore, name=standin.NAME))
    return data


def _start(
    side: str, tests: Path, data: Path, engine: Path, results: Path, chosen: Sequence[str]
) -> "subprocess.Popen[bytes]":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | BOUND  # two engines on the same processors slow each other by spinning
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parents[1], tests))),
        "LLAMA_SERVER_BIN_PATH": str(engine),
        "LLAMA_TESTS_SIDE": side,
        "LLAMA_TESTS_DATA": str(data),
        "PORT": str(port),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "harness", "-p", "no:cacheprovider", "-m", "not slow"]
    options = ["--tb=short", "--junitxml", str(results / f"{side}.xml"), "-o", "junit_family=xunit1"]
    with (results / f"{side}.log").open("wb") as log:
        return subprocess.Popen([*command, *options, *chosen], cwd=tests, env=environment, stdout=log, stderr=log)


def _cases(result: Path) -> Iterator[tuple[str, Case]]:
    for element in ElementTree.parse(result).getroot().iter("testcase"):
        found = next((child for child in element if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if found is None else "skipped" if found.tag == "skipped" else "failed"
        message = "" if found is None else found.get("message", "")
        properties = [(item.get("name"), item.get("value", "")) for item in element.iter("property")]
        refused, missing = (tuple(v for n, v in properties if n == name) for name in ("refused", "missing"))
        name = f"{element.get('classname', '').removeprefix('unit.')}.{element.get('name')}"
        yield name, Case(outcome, message, refused, missing)


def _report(direct: dict[str, Case], daemon: dict[str, Case], *, whole: bool) -> int:
    """Prints the table and returns the exit code. `whole` is True if no test was left out: then each rule must hold."""
    rules = tomllib.loads((HERE / "differences.toml").read_text("utf-8"))
    both = [name for name in direct if "skipped" not in (direct[name].outcome, daemon[name].outcome)]
    passed = {name for name in both if direct[name].outcome == "passed"}
    through = {name for name in both if daemon[name].outcome == "passed"}
    differences = {name: _explain(name, daemon[name], rules) for name in both if name in passed - through}
    for name, found in sorted(differences.items(), key=lambda item: (item[1].kind, item[1].reason)):
        print(f"{found.kind:18} {name}\n{'':18} {found.reason}")
    for name in sorted(through - passed):
        print(f"{'daemon alone':18} {name}")
    counts = Counter(found.kind for found in differences.values())
    print(f"\n{len(direct):4} cases\n{len(both):4} that can run here, on both sides")
    print(f"{len(passed):4} passed directly\n{len(passed & through):4} of these passed through the daemon, too")
    print("".join(f"{count:4} did not: {kind}\n" for kind, count in sorted(counts.items())), end="")
    print(f"{len(through - passed):4} passed through the daemon alone")
    stale = [pattern for pattern in rules["contracts"] if whole and not fnmatch.filter(differences, pattern)]
    print("".join(f"no test differs as {pattern}: remove its rule\n" for pattern in stale), end="")
    return 1 if counts[UNEXPLAINED] or stale else 0


def _explain(name: str, case: Case, rules: dict[str, dict[str, str]]) -> Difference:
    """A refused option ends a test at its start, so it comes first. A named contract is more exact than a route."""
    for option in case.refused:
        if option in rules["options"]:
            return Difference("option not taken", f"{option}: {rules['options'][option]}")
    for pattern, reason in rules["contracts"].items():
        if fnmatch.fnmatchcase(name, pattern):
            return Difference("another contract", reason)
    for route in case.missing:
        for pattern, reason in rules["routes"].items():
            if fnmatch.fnmatchcase(route, pattern):
                return Difference("route not exposed", f"{route}: {reason}")
    return Difference(UNEXPLAINED, " ".join((*case.refused, *case.missing, case.message))[:400])


if __name__ == "__main__":
    sys.exit(main())
