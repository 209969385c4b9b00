"""Claims of pulls and uploads to the quota: their files together cannot exceed it."""

import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager

from modelrunner.errors import InsufficientDisk
from modelrunner.store import Digest, Store
from modelrunner.units import format_bytes

_Sizes = dict[Hashable, int]


class Claims:
    """The claims of all pulls and uploads. A file that several claim, or that the store has by now, counts once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._held: list[_Sizes] = []

    @contextmanager
    def claim(self) -> Iterator["Claim"]:
        """Yields an empty claim, which ends with the block."""
        claim = Claim(self)
        with self._lock:
            self._held.append(claim.files)
        try:
            yield claim
        finally:
            with self._lock:
                self._held = [files for files in self._held if files is not claim.files]

    def extend(self, claim: "Claim", files: Mapping[Hashable, int]) -> None:
        """Adds `files` to the claim, as `Claim.require` does. The disks are asked without the lock; they are asked
        again after another claim has grown, and before a refusal, because other claims' files may be stored by then."""
        here: dict[Hashable, bool] = {}
        while True:
            with self._lock:
                wanted, beside = self._counted(claim, files)
                keys = wanted.keys() | beside.keys()
                is_known = keys <= here.keys()
                error = self._excess(_without(wanted, here), _without(beside, here)) if is_known else None
                if is_known and error is None:
                    claim.files.update(files)
                    return
            before, here = here, {key: self._is_stored(key) for key in keys}
            if error is not None and here == before:
                raise error

    def _counted(self, claim: "Claim", files: Mapping[Hashable, int]) -> tuple[_Sizes, _Sizes]:
        """Returns the sizes of the claim with `files`, and those of the other claims."""
        wanted = claim.files | dict(files)
        others: _Sizes = {}
        for held in self._held:
            if held is not claim.files:
                others |= held
        return wanted, {key: size for key, size in others.items() if key not in wanted}

    def _excess(self, wanted: _Sizes, beside: _Sizes) -> InsufficientDisk | None:
        """Returns the error if `wanted` and `beside` together exceed the quota."""
        try:
            self._store.require_quota(sum(wanted.values()) + sum(beside.values()))
        except InsufficientDisk as error:
            if not beside:
                return error
            coming = format_bytes(sum(beside.values()))
            return error.saying(f"{error.message}; {coming} of them are promised to models on their way")
        return None

    def _is_stored(self, key: Hashable) -> bool:
        """Returns whether `key` is the digest of a stored file."""
        return isinstance(key, Digest) and self._store.have(str(key)) is not None


def _without(files: _Sizes, here: Mapping[Hashable, bool]) -> _Sizes:
    """Returns the files that are not stored."""
    return {key: size for key, size in files.items() if not here[key]}


class Claim:
    """The claim of one pull or upload. `files` has the size of each file, in bytes."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self.files: _Sizes = {}

    def require(self, files: Mapping[Hashable, int]) -> None:
        """Claims `files` too: their sizes by their digests, or by any other key that no other file has. Asks the disks:
        call it in any thread but the event loop's. Raises `InsufficientDisk`, with nothing more claimed, if the quota
        is exceeded."""
        self._claims.extend(self, files)
