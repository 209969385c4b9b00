"""`file:///abs/path.gguf` or `file:///abs/folder`: on this machine, a GGUF file (or one of several shards), or a folder
with a model in safetensors. Further files of the model follow a question mark (`with_parts`). A path may be a symbolic
link, as the files in the cache of Hugging Face are: its target is copied. Files are copied, never moved; a copy shares
its blocks with the original if the file system supports that."""

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from modelrunner import lora
from modelrunner.concurrency.threads import HASHING, in_thread
from modelrunner.errors import BadRequest, InvalidModel, ModelNotFound, UnsupportedModel
from modelrunner.lora import LoraPath
from modelrunner.progress import FileProgress, WorkProgress
from modelrunner.pull import linking
from modelrunner.pull.selection import folder_files, with_shards
from modelrunner.pull.source import Context, FetchResult, PullSpec, Source, make_way
from modelrunner.store import Store, adapters, foreignformats
from modelrunner.store.files import require_space
from modelrunner.store.names import PROJECTOR, TEMPLATE, WEIGHTS, is_code
from modelrunner.types import ModelFormat

_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # its docs/spec.md
_PARTS = {"mmproj": PROJECTOR, "chat-template": TEMPLATE}
_LORA = "lora"
_STORED = "stored://"
_STEP = 16 << 20
# The kernel, the file system or the pair of file systems lacks copy_file_range.
_NO_RANGE_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ETXTBSY}


class FileSource(Source):
    """Files of this machine. The server serves it only to callers who could open the files themselves."""

    is_local = True

    def claims(self, text: str) -> bool:
        return text.startswith("file:")

    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        """Copies the files. Raises `ModelNotFound`, `BadRequest` for a file that is not regular or may not be read,
        `InvalidModel` for a file that is not GGUF, `UnsupportedModel` for a folder with code in it, all before the
        first copy."""
        (source, parts, loras), folder, trust = _places(wanted.text), context.folder, wanted.trust
        loop = asyncio.get_running_loop()

        def copied(name: str, size: int, done: int, total: int) -> None:
            progress = WorkProgress(f"Copying {name}", "copying", total, done, FileProgress(name, size, size))
            loop.call_soon_threadsafe(context.report, progress)

        def work(stop: threading.Event) -> dict[str, Path]:
            with ExitStack() as stack:
                base, whole = self._base(source, trust)
                paths = base | parts
                for adapter in loras:
                    adapters.require(adapter.path, folder=whole)
                    paths |= adapter.files(folder=whole)
                magic = {name: _MAGIC for name in paths if name.endswith(".gguf")}
                opened = {name: _open(path, magic.get(name, b""), stack) for name, path in paths.items()}
                sizes = {name: os.fstat(descriptor).st_size for name, descriptor in opened.items()}
                self._require_space(folder, sizes.values())
                done = 0
                for name, descriptor in opened.items():
                    if self._is_copied(descriptor, make_way(folder, name)):
                        _copy(descriptor, folder / name, sizes[name], stop)
                    done += sizes[name]
                    copied(paths[name].name, sizes[name], done, sum(sizes.values()))
                return {name: folder / name for name in paths}

        return FetchResult(await in_thread(work, HASHING))

    def _base(self, source: str, trust: bool) -> tuple[dict[str, Path], bool]:
        """Returns the files of the model itself, and whether they come from a folder."""
        original = _path(source, "from")
        whole = original.is_dir()
        return (_in_folder(original, trust) if whole else _shards(original)), whole

    def _require_space(self, folder: Path, sizes: Iterable[int]) -> None:
        require_space(folder, sum(sizes))

    def _is_copied(self, descriptor: int, target: Path) -> bool:
        """Returns False if `target` was made of the open file in another way."""
        return True


class ImportSource(FileSource):
    """`import:///abs/path`: a file of another program. The files are cloned or hard-linked if the file systems allow
    it: the program's files do not change, and nothing is written into a file that both have."""

    def claims(self, text: str) -> bool:
        return text.startswith("import:")

    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        return await super().fetch(replace(wanted, text=f"file:{wanted.text.removeprefix('import:')}"), context)

    def _require_space(self, folder: Path, sizes: Iterable[int]) -> None:
        """Requires nothing: links need no space, and a copy that does not fit fails while it is written."""

    def _is_copied(self, descriptor: int, target: Path) -> bool:
        return linking.take(descriptor, target) is linking.LinkKind.COPY


class StoredSource(FileSource):
    """`stored://REF`: a model in the store, for a new model that is made of its files."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def claims(self, text: str) -> bool:
        return text.startswith(_STORED)

    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        fetched = await super().fetch(wanted, context)
        stored = {name: blob.digest.hex for name, blob in self._store.files(_stored(wanted.text)).items()}
        return replace(fetched, stored={name: hex for name, hex in stored.items() if name not in fetched.files})

    def _base(self, source: str, trust: bool) -> tuple[dict[str, Path], bool]:
        return {}, self._store.get(_stored(source)).format == ModelFormat.SAFETENSORS


def stored_source(reference: str) -> str:
    """Returns the text of a `StoredSource`."""
    return f"{_STORED}{quote(reference, safe='')}"


def _stored(text: str) -> str:
    return unquote(text.removeprefix(_STORED).partition("?")[0])


def with_parts(text: str, parts: Iterable[tuple[str, str]]) -> str:
    """Returns the source `text` with further files of the model, written as in `file://` addresses. Each of the `parts`
    is a name and a file: `mmproj` (a projector in GGUF), `chat-template` (Jinja), or `lora`, a LoRA adapter (`lora.py`)
    that may end with a colon and its scale."""
    return f"{text}?{query}" if (query := urlencode(list(parts))) else text


def _places(text: str) -> tuple[str, dict[str, Path], list[LoraPath]]:
    """Returns the source without its further files, these files by their names in the bundle, and the adapters. Raises
    `BadRequest`."""
    source, mark, query = text.partition("?")
    try:
        given = parse_qsl(query, strict_parsing=True, errors="strict") if mark else []
        parts = {_PARTS[name]: _path(part, name) for name, part in given if name != _LORA}
    except (KeyError, ValueError):
        raise BadRequest(f"{text!r} names no file: write a question mark as %3F", param="from") from None
    places = [lora.split(part) for name, part in given if name == _LORA]
    loras = [LoraPath(_path(place, _LORA), scale) for place, scale in places]
    lora.check(loras)
    return source, parts, loras


def _path(text: str, param: str) -> Path:
    parts = urlsplit(text)
    local = parts.scheme == "file" and parts.netloc in ("", "localhost")
    path = unquote(parts.path, errors="strict") if local else ""
    if not path.startswith("/") or "\0" in path or parts.query or parts.fragment:
        raise BadRequest(f"{text!r} names no file: write file:///absolute/path", param=param)
    return Path(path)


def _shards(file: Path) -> dict[str, Path]:
    """Returns the shards by their names in the bundle. A link may have another name than the shard that is its
    target."""
    for place in dict.fromkeys((file, Path(os.path.realpath(file)))):
        beside = os.listdir(place.parent) if place.parent.is_dir() else ()
        found = {name: place.with_name(shard) for name, shard in with_shards(beside, place.name).items()}
        if len(found) > 1:
            return found
    return {file.name if foreignformats.is_file(file.name) else "model.gguf": file}


def _in_folder(folder: Path, trust: bool) -> dict[str, Path]:
    """Returns the files of the model in the folder, by their names in the bundle. Code is refused and not just left
    out: the caller can change the folder."""
    within = (folder, *(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()))
    names = [str(path.relative_to(folder)) for place in within for path in place.iterdir()]
    if (foreign := foreignformats.format_of(names)) is not None and not any(name.endswith(WEIGHTS) for name in names):
        return {name: folder / name for name in foreign.chosen(names)}
    code = sorted(name for name in names if is_code(name))
    if code and not trust:
        raise UnsupportedModel(
            f"{folder} carries code: {code[0]!r}. Take it out, or, if you trust it, package the folder with"
            " `--trust-remote-code`"
        )
    chosen = folder_files(names, trust=trust)
    if not chosen:
        raise InvalidModel(f"{folder} holds no model in safetensors; to package a GGUF file, give the file itself")
    return {name: folder / name for name in chosen}


def _open(path: Path, magic: bytes, stack: ExitStack) -> int:
    """Opens a regular file for reading. Does not wait for a FIFO or open a terminal. A link is resolved once."""
    try:
        descriptor = os.open(
            os.path.realpath(path, strict=True),
            os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC,
        )
    except FileNotFoundError:
        raise ModelNotFound(f"there is no file {path}") from None
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", param="from") from None
    stack.callback(os.close, descriptor)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise BadRequest(f"{path} is not a regular file", param="from")
    if os.pread(descriptor, len(_LFS_POINTER), 0) == _LFS_POINTER:
        raise InvalidModel(f"{path} is a pointer of git-lfs and not the file itself: fetch that with `git lfs pull`")
    if os.pread(descriptor, len(magic), 0) != magic:
        raise InvalidModel(f"{path} is not a GGUF file: it does not begin with GGUF")
    return descriptor


def _copy(source: int, target: Path, size: int, stop: threading.Event) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    destination = os.open(target, flags, 0o600)
    try:
        position = 0
        while position < size and not stop.is_set():
            moved = _move(source, destination, position, min(_STEP, size - position))
            if not moved:
                raise InvalidModel("the file became shorter while it was copied")
            position += moved
    finally:
        os.close(destination)


def _move(source: int, destination: int, position: int, count: int) -> int:
    """Copies at most `count` bytes; returns how many were copied."""
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, destination, count, offset_src=position)
        except OSError as error:
            if error.errno not in _NO_RANGE_COPY:
                raise
    return os.write(destination, os.pread(source, min(count, 1 << 20), position))
