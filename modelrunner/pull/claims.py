"""The room in the quota that models on their way have: together they cannot pass it, whichever way each comes."""

import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager

from modelrunner.errors import InsufficientDisk
from modelrunner.store import Digest, Store
from modelrunner.units import format_bytes

_Sizes = dict[Hashable, int]


class Claims:
    """Those of all pulls and uploads. A file that several claim, or that is stored by now, counts once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._held: list[_Sizes] = []

    @contextmanager
    def claim(self) -> Iterator["Claim"]:
        """A claim to nothing yet, which ends with the block."""
        claim = Claim(self)
        with self._lock:
            self._held.append(claim.files)
        try:
            yield claim
        finally:
            with self._lock:
                self._held = [files for files in self._held if files is not claim.files]

    def extend(self, claim: "Claim", files: Mapping[Hashable, int]) -> None:
        """As `Claim.require`. The disks are asked without the lock, and once more where somebody has claimed more
        meanwhile, and before a refusal: what others bring may have been stored."""
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
        """What the claim has with `files`, and what others have beside it."""
        wanted = claim.files | dict(files)
        others: _Sizes = {}
        for held in self._held:
            if held is not claim.files:
                others |= held
        return wanted, {key: size for key, size in others.items() if key not in wanted}

    def _excess(self, wanted: _Sizes, beside: _Sizes) -> InsufficientDisk | None:
        """The error if these are more than models may have."""
        try:
            self._store.require_quota(sum(wanted.values()) + sum(beside.values()))
        except InsufficientDisk as error:
            if not beside:
                return error
            coming = format_bytes(sum(beside.values()))
            return error.saying(f"{error.message}; {coming} of them are promised to what is coming")
        return None

    def _is_stored(self, key: Hashable) -> bool:
        """Whether it is the digest of a stored file."""
        return isinstance(key, Digest) and self._store.have(str(key)) is not None


def _without(files: _Sizes, here: Mapping[Hashable, bool]) -> _Sizes:
    """Those that are not stored."""
    return {key: size for key, size in files.items() if not here[key]}


class Claim:
    """What one pull or upload may bring. `files` has the size of each, in bytes."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self.files: _Sizes = {}

    def require(self, files: Mapping[Hashable, int]) -> None:
        """Claims `files`, too: their sizes by their digests, or by anything that is theirs alone. Asks the disks, in
        any thread but the event loop's. Raises `InsufficientDisk`, with nothing more claimed, if that is more than
        models may have."""
        self._claims.extend(self, files)
