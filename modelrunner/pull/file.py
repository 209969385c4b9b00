"""Models of files on this machine. A path may be a symbolic link, as the files in the cache of Hugging Face are: its
target is copied. Files are copied, never moved; a copy shares its blocks with the original if the file system supports
that."""

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from modelrunner import lora
from modelrunner.concurrency.threads import HASHING, in_thread
from modelrunner.errors import BadRequest, InvalidModel, ModelNotFound, UnsupportedModel
from modelrunner.lora import LoraPath
from modelrunner.progress import FileProgress, WorkProgress
from modelrunner.pull import linking
from modelrunner.pull.selection import folder_files, with_shards
from modelrunner.pull.source import Context, FetchResult, LocalOrigin, PullSpec, make_way
from modelrunner.store import Store, adapters, foreignformats
from modelrunner.store.files import require_space
from modelrunner.store.names import PROJECTOR, TEMPLATE, is_code
from modelrunner.types import ModelFormat

_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # its docs/spec.md
_STEP = 16 << 20
# The kernel, the file system or the pair of file systems lacks copy_file_range.
_NO_RANGE_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ETXTBSY}


@dataclass(frozen=True, slots=True)
class Extras:
    """Files that become parts of a model beside its own: a projector in GGUF, a chat template (Jinja), and LoRA
    adapters."""

    mmproj: Path | None = None
    chat_template: Path | None = None
    lora: tuple[LoraPath, ...] = ()

    def __str__(self) -> str:
        named = {PROJECTOR: self.mmproj, TEMPLATE: self.chat_template}
        files = [f"{name} {path}" for name, path in named.items() if path]
        return "".join(f" with {text}" for text in (*files, *(f"{each.path}:{each.scale:g}" for each in self.lora)))

    def files(self, *, folder: bool) -> dict[str, Path]:
        """Returns the files by their names in the bundle; `folder` is True for a model of safetensors. Raises
        `BadRequest`, `InvalidModel`."""
        lora.check(self.lora)
        files = {PROJECTOR: self.mmproj, TEMPLATE: self.chat_template}
        paths = {name: path for name, path in files.items() if path is not None}
        for adapter in self.lora:
            adapters.require(adapter.path, folder=folder)
            paths |= adapter.files(folder=folder)
        return paths


@dataclass(frozen=True, slots=True)
class LocalFiles(LocalOrigin):
    """A model of files on this machine: a GGUF file (or one of several shards), or a folder with a model in
    safetensors. The server takes it only from callers who could open the files themselves. With `linked`, they are of
    another program: they are cloned or hard-linked if the file systems allow it, since the program's files do not
    change, and nothing is written into a file that both have."""

    path: Path
    extras: Extras = Extras()  # it is immutable
    linked: bool = False

    def __str__(self) -> str:
        return f"{self.path.as_uri()}{self.extras}"

    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        """Copies the files. Raises `ModelNotFound`, `BadRequest` for a file that is not regular or may not be read,
        `InvalidModel` for a file that is not GGUF, `UnsupportedModel` for a folder with code in it, all before the
        first copy."""

        def find() -> dict[str, Path]:
            whole = self.path.is_dir()
            files = _in_folder(self.path, wanted.trust) if whole else _shards(self.path)
            return files | self.extras.files(folder=whole)

        return FetchResult(await _copied(find, context, linked=self.linked))


@dataclass(frozen=True, slots=True)
class StoredFiles(LocalOrigin):
    """The files of a model in the store, for a new model that is made of them and of others."""

    store: Store
    model: str
    extras: Extras = Extras()  # it is immutable

    def __str__(self) -> str:
        return f"{self.model}{self.extras}"

    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        def find() -> dict[str, Path]:
            return self.extras.files(folder=self.store.get(self.model).format == ModelFormat.SAFETENSORS)

        copied = await _copied(find, context)
        stored = {name: blob.digest.hex for name, blob in self.store.files(self.model).items()}
        return FetchResult(copied, stored={name: hex for name, hex in stored.items() if name not in copied})


def is_file(text: str) -> bool:
    """Returns whether the text has the form `file:...`, even if it is wrong in other ways."""
    return text.startswith("file:")


async def _copied(find: Callable[[], dict[str, Path]], context: Context, *, linked: bool = False) -> dict[str, Path]:
    """Copies the found files into the folder of the pull, and returns the copies by the same names. `linked` files are
    linked or cloned where that is possible."""
    loop, folder = asyncio.get_running_loop(), context.folder

    def copied(name: str, size: int, done: int, total: int) -> None:
        progress = WorkProgress(f"Copying {name}", "copying", total, done, FileProgress(name, size, size))
        loop.call_soon_threadsafe(context.report, progress)

    def work(stop: threading.Event) -> dict[str, Path]:
        with ExitStack() as stack:
            paths = find()
            magic = {name: _MAGIC for name in paths if name.endswith(".gguf")}
            opened = {name: _open(path, magic.get(name, b""), stack) for name, path in paths.items()}
            sizes = {name: os.fstat(descriptor).st_size for name, descriptor in opened.items()}
            if not linked:  # links need no space, and a copy that does not fit fails while it is written
                require_space(folder, sum(sizes.values()))
            done = 0
            for name, descriptor in opened.items():
                target = make_way(folder, name)
                if not linked or linking.take(descriptor, target) is linking.LinkKind.COPY:
                    _copy(descriptor, target, sizes[name], stop)
                done += sizes[name]
                copied(paths[name].name, sizes[name], done, sum(sizes.values()))
            return {name: folder / name for name in paths}

    return await in_thread(work, HASHING)


def path_of(text: str, param: str) -> Path:
    """Returns the path in `file:///absolute/path`. Raises `BadRequest`, which names the parameter."""
    parts = urlsplit(text)
    local = parts.scheme == "file" and parts.netloc in ("", "localhost")
    path = unquote(parts.path, errors="strict") if local else ""
    if not path.startswith("/") or "\0" in path or parts.query or parts.fragment:
        raise BadRequest(f"{text!r} names no file: write file:///absolute/path, a question mark as %3F", param=param)
    return Path(path)


def _shards(file: Path) -> dict[str, Path]:
    """Returns the shards by their names in the bundle. A link may have another name than the shard that is its
    target."""
    for place in dict.fromkeys((file, Path(os.path.realpath(file)))):
        beside = os.listdir(place.parent) if place.parent.is_dir() else ()
        places = {name: place.with_name(shard) for name, shard in with_shards(beside, place.name).items()}
        if len(places) > 1:
            return places
    return {file.name if foreignformats.is_file(file.name) else "model.gguf": file}


def _in_folder(folder: Path, trust: bool) -> dict[str, Path]:
    """Returns the files of the model in the folder, by their names in the bundle. Code is refused and not just left
    out: the caller can change the folder."""
    within = (folder, *(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()))
    names = [str(path.relative_to(folder)) for place in within for path in place.iterdir()]
    if foreign := foreignformats.files_in(names):
        return {name: folder / name for name in foreign}
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
