"""The room in the quota that models on their way have: together they cannot pass it, whichever way each comes."""

import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager

from modelrunner.errors import InsufficientDisk
from modelrunner.store import Digest, Store
from modelrunner.units import format_bytes


class Claims:
    """Those of all pulls and uploads. A file that several claim, or that is stored by now, counts once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._held: list[dict[Hashable, int]] = []

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
        """As `Claim.require`."""
        with self._lock:
            others: dict[Hashable, int] = {}
            for held in self._held:
                if held is not claim.files:
                    others |= held
            wanted = self._missing(claim.files | dict(files))
            beside = self._missing({key: size for key, size in others.items() if key not in wanted})
            try:
                self._store.require_quota(sum(wanted.values()) + sum(beside.values()))
            except InsufficientDisk as error:
                if not beside:
                    raise
                coming = format_bytes(sum(beside.values()))
                raise error.saying(f"{error.message}; {coming} of them are promised to what is coming") from None
            claim.files.update(files)

    def _missing(self, files: Mapping[Hashable, int]) -> dict[Hashable, int]:
        def is_here(key: Hashable) -> bool:
            return isinstance(key, Digest) and self._store.have(str(key)) is not None

        return {key: size for key, size in files.items() if not is_here(key)}


class Claim:
    """What one pull or upload may bring. `files` has the size of each, in bytes."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self.files: dict[Hashable, int] = {}

    def require(self, files: Mapping[Hashable, int]) -> None:
        """Claims `files`, too: their sizes by their digests, or by anything that is theirs alone. May be called in any
        thread. Raises `InsufficientDisk`, with nothing more claimed, if that is more than models may have."""
        self._claims.extend(self, files)
