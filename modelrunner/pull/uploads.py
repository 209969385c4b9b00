"""Files that a client uploads over HTTP before it makes a model of them."""

import asyncio
import hashlib
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from modelrunner import durable, lora
from modelrunner.concurrency.threads import LOADING, LoopStream, in_thread
from modelrunner.errors import BadRequest, InsufficientDisk, ModelNotFound, PayloadTooLarge, UnsupportedModel
from modelrunner.pull.claims import Claim, Claims
from modelrunner.pull.places import remove_all, roomy
from modelrunner.pull.selection import choose, folder_files
from modelrunner.pull.source import Context, FetchResult, LocalOrigin, PullSpec
from modelrunner.store import Digest, Store, foreignformats
from modelrunner.store.files import require_space, size_of
from modelrunner.store.names import CONFIG, is_code

LARGEST = 1 << 40  # bytes of one file
_UPLOAD = "upload-"
_KEPT = 86_400.0  # seconds that a file waits for its model
_PIECE, _STEP = 1 << 20, 64 << 20  # bytes that are written at once; bytes after which more room is claimed


class Uploads:
    """Verified files in the store's folders for partial files. A file that becomes part of no model is removed after a
    day, or by `prune`. `claims` are those of uploads and pulls together. Belongs to one event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.claims = Claims(store)
        self._writing: set[Path] = set()
        self._users: Counter[Digest] = Counter()

    def is_busy(self, path: Path) -> bool:
        """Returns whether the file is being written, or a pull takes it. Any thread may call it."""
        return path in self._writing or Digest.named(path.name.removeprefix(_UPLOAD)) in self._users

    @contextmanager
    def using(self, digests: Collection[Digest]) -> Iterator[None]:
        """Keeps the files within the block."""
        self._users.update(digests)
        try:
            yield
        finally:
            self._users -= Counter(digests)

    def _places(self, digest: Digest) -> Iterator[Path]:
        """Yields the paths at which the file may wait."""
        return (place.data / "partial" / f"{_UPLOAD}{digest.hex}" for place in self.store.places())

    def find(self, digest: Digest) -> Path | None:
        """Returns the path of the waiting file, None if it does not wait. Blocks."""
        return next(filter(os.path.isfile, self._places(digest)), None)

    async def has(self, digest: str) -> bool:
        """Returns whether the file is here, in a model or waiting. Raises `InvalidReference`."""
        wanted = Digest.parse(digest)
        return await in_thread(lambda _: self.store.have(digest) is not None or self.find(wanted) is not None)

    async def waits(self, digest: str) -> bool:
        """Returns whether the file waits for its model. Raises `InvalidReference`."""
        wanted = Digest.parse(digest)
        return await in_thread(lambda _: self.find(wanted) is not None)

    async def take(self, digest: str, pieces: AsyncIterator[bytes], size: int) -> None:
        """Takes the file as its bytes come; `size` is the number of all bytes, 0 if unknown. Nothing stays of a file
        that fails. Raises `InvalidReference`, `BadRequest` for other content than `digest` names, `PayloadTooLarge`,
        `InsufficientDisk`, `StorageFailed`, and the errors of `pieces`."""
        wanted, loop = Digest.parse(digest), asyncio.get_running_loop()
        if size > LARGEST:
            raise PayloadTooLarge(f"a file has at most {LARGEST} bytes")
        path = await in_thread(lambda _: roomy(self.store, size)) / f"{_UPLOAD}{wanted.hex}"
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")

        def work(stop: threading.Event) -> None:
            with durable.translated("storing a file", path.parent):
                self._remove_old()
                try:
                    with self.claims.claim() as claim:
                        self._write(temporary, wanted, LoopStream(pieces, loop, stop), size, claim)
                        os.chmod(temporary, 0o444)
                        os.rename(temporary, path)
                finally:
                    durable.discard(temporary)

        self._writing.add(temporary)
        try:
            await in_thread(work, LOADING)
        finally:
            self._writing.discard(temporary)

    def _write(self, path: Path, wanted: Digest, stream: LoopStream, size: int, claim: Claim) -> None:
        sha256, written, room = hashlib.sha256(), 0, 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            while piece := stream.read(_PIECE):
                written += len(piece)
                if written > LARGEST:
                    raise PayloadTooLarge(f"a file has at most {LARGEST} bytes")
                if written > room:
                    room = self._room(claim, wanted, written, size)
                    require_space(path.parent, room - written)
                sha256.update(piece)
                file.write(piece)
            durable.sync(descriptor)
        if sha256.hexdigest() != wanted.hex:
            raise BadRequest(f"the sent file does not have the digest {wanted}: send the file again", param="digest")

    def _room(self, claim: Claim, wanted: Digest, written: int, size: int) -> int:
        """Claims room for a file of which `written` bytes have come, and returns the claimed size: `size` if that is
        known, else one more step, or the bytes so far if the quota has no more."""
        claim.require(self._waiting())
        if written > size:
            with suppress(InsufficientDisk):
                claim.require({wanted: written + _STEP})
                return written + _STEP
        claim.require({wanted: max(size, written)})
        return max(size, written)

    def _waiting(self) -> dict[Hashable, int]:
        """Returns the files that belong to no model yet."""
        paths = {Digest.named(path.name.removeprefix(_UPLOAD)): path for path in self._all()}
        return {digest: size_of(path) for digest, path in paths.items() if digest}

    def _all(self) -> Iterator[Path]:
        """Yields every uploaded file, complete or not, in the folders whose disk answers."""
        for place in self.store.places():
            with suppress(OSError):
                yield from (place.data / "partial").glob(f"{_UPLOAD}*")

    def _remove_old(self) -> None:
        old: list[Path] = []
        for path in self._all():
            with suppress(OSError):
                if not self.is_busy(path) and time.time() - path.lstat().st_mtime > _KEPT:
                    old.append(path)
        remove_all(old)

    def drop(self, digests: Collection[Digest]) -> None:
        """Removes the files, which a model has by now, if no pull takes them. Blocks."""
        remove_all(path for digest in digests if digest not in self._users for path in self._places(digest))


@dataclass(frozen=True, slots=True)
class UploadedFiles(LocalOrigin):
    """A model of files that were sent before, or that the store has: `files` maps their names to their digests. With a
    `model` of the store, they are LoRA adapters for that."""

    uploads: Uploads
    files: Mapping[str, Digest]
    model: str = ""

    @classmethod
    def parse(cls, uploads: Uploads, files: Mapping[str, str], model: str = "") -> Self:
        """Takes the digests as texts. Raises `InvalidReference`."""
        return cls(uploads, {name: Digest.parse(digest) for name, digest in files.items()}, model)

    def __str__(self) -> str:
        files = ", ".join(f"{name} ({digest})" for name, digest in self.files.items())
        return f"{self.model} with {files}" if self.model else files

    @property
    def sent(self) -> Collection[Digest]:
        return frozenset(self.files.values())

    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        """Takes the files. Raises `ModelNotFound` for a file that is not here."""
        return await in_thread(lambda _: self._fetch())

    def _fetch(self) -> FetchResult:
        store = self.uploads.store
        stored = {name: blob.digest.hex for name, blob in store.files(self.model).items()} if self.model else {}
        files: dict[str, Path] = {}
        digests: dict[str, str] = {}
        for name, source in (_adapters if self.model else _chosen)(self.files).items():
            digest = self.files[source]
            if store.have(str(digest)) is not None:
                stored[name] = digest.hex
            elif (waiting := self.uploads.find(digest)) is not None:  # the file stays there until the model is made
                files[name], digests[name] = waiting, digest.hex
                stored.pop(name, None)
            else:
                raise ModelNotFound(f"the file {source!r} ({digest}) is not here: send it first", param="files")
        return FetchResult(files, digests, stored)


def _adapters(names: Mapping[str, Digest]) -> dict[str, str]:
    """Maps names in the bundle to given names: each a file in GGUF, or the two of a PEFT folder. Raises
    `BadRequest`."""
    if names.keys() == {lora.CONFIG, lora.WEIGHTS}:
        return {place: path.name for place, path in lora.LoraPath(Path("adapter")).files(folder=True).items()}
    if odd := next((name for name in names if not name.lower().endswith(".gguf")), None):
        raise BadRequest(
            f"{odd!r} is not a LoRA adapter: give a file in GGUF, or {lora.CONFIG} and {lora.WEIGHTS}", param="adapters"
        )
    paths = {name: lora.LoraPath(Path(name)) for name in names}
    lora.check(paths.values())
    return {place: name for name, adapter in paths.items() for place in adapter.files(folder=False)}


def _chosen(names: Mapping[str, Digest]) -> dict[str, str]:
    """Maps names in the bundle to given names. Raises `UnsupportedModel`."""
    foreign = foreignformats.files_in(names)
    if code := sorted(filter(is_code, set(names).difference(foreign))):
        raise UnsupportedModel(f"the files carry code: {code[0]!r}. Leave it out")
    if foreign:
        return {name: name for name in foreign}
    if CONFIG in names:
        if chosen := folder_files(names, trust=False):
            return {name: name for name in chosen}
    elif len(names) == 1:
        return {"model.gguf": next(iter(names))}
    return choose(names, None, "the uploaded files")
