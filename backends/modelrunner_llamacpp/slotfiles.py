"""Saved KV caches on disk: one folder for each model, engine and set of options, and in it the files of each owner.
Their total size is bounded; the oldest files are removed first.

A file has llama.cpp's own format (`llama_state_seq_save_file`): a head of three 32-bit numbers (magic, version, words
of the prompt), the prompt, then keys and values. Since mid 2026 the prompt is a list with a head of its own
(`server_tokens::serialize`: -1, version, tokens, their IDs, then images); earlier it was the bare token IDs. A name is
the time of the last use in nanoseconds, which sorts the files, a digest of the owner (in the name, because a running
engine knows one folder), and a CRC-32: engines crash on cut files, and accept other damaged ones.
"""

import hashlib
import logging
import re
import shutil
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modelrunner import durable

log = logging.getLogger(__name__)

WORD = 4  # bytes of a token's ID
_LONG = 256  # tokens: computing them takes a CPU seconds, and shorter prompts never displace them
_MAGIC = 0x67677371  # LLAMA_FILE_MAGIC_GGSQ
_MOST_WORDS = 1 << 24
_SAVED, _PARTIAL = ".slot", ".part"
_NAME = re.compile(rf"[0-9]{{20}}-[0-9a-f]{{32}}-[0-9a-f]{{8}}\{_SAVED}")
_MODEL_ID = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """A complete file. `prompt` has the IDs of its tokens as bytes, for comparison. `tokens` is their number."""

    path: Path
    prompt: bytes

    @property
    def tokens(self) -> int:
        return len(self.prompt) // WORD


class SlotFiles:
    """All saved files, in the folder `root`, which nothing else uses. Together they may have `bound` bytes. Every
    method uses the disk."""

    def __init__(self, root: Path, bound: int) -> None:
        self._root = root
        self._bound = bound

    def heal(self) -> None:
        """Removes half-written files of a killed daemon, others without an owner, and files beyond the bound. The
        backend calls it when the daemon starts."""
        try:
            for path in self._root.glob("*/*/*"):
                if not _NAME.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            self.trim()
            for folder in (*self._root.glob("*/*/"), *self._root.glob("*/")):
                if not any(folder.iterdir()):
                    folder.rmdir()
        except OSError as error:
            log.warning("old prompt caches cannot be removed: %s", error)

    def folder(self, model_id: str, key: str) -> Path:
        """Makes and returns the folder for a model and key. Nobody else can read it: the files hold conversations."""
        path = self._of(model_id) / key
        for part in (self._root.parent, self._root, path.parent, path):
            part.mkdir(mode=0o700, exist_ok=True)
        return path

    def forget(self, model_id: str) -> None:
        """Removes the files of a model that was removed."""
        shutil.rmtree(self._of(model_id), ignore_errors=True)

    def trim(self) -> None:
        """Removes the oldest files until the rest is within the bound."""
        room = self._bound
        for path in sorted(self._saved(), key=lambda path: path.name, reverse=True):
            room -= path.stat().st_size
            if room < 0:
                path.unlink(missing_ok=True)

    def _saved(self) -> list[Path]:
        return list(self._root.glob(f"*/*/*{_SAVED}"))

    def _of(self, model_id: str) -> Path:
        if not _MODEL_ID.fullmatch(model_id):
            raise ValueError(f"{model_id!r} is no model ID")
        return self._root / model_id.removeprefix("sha256:")


def partial(folder: Path, owner: str, used: int) -> Path:
    """Returns the file in which the engine writes the state of a slot that was last used at `used` (nanoseconds)."""
    return folder / f"{used:020d}-{_mark(owner)}{_PARTIAL}"


def publish(written: Path) -> None:
    """Publishes a file that the engine has written. The file is complete even after a power cut. Raises `OSError`."""
    durable.sync_file(written)
    written.rename(written.with_name(f"{written.stem}-{_checksum(written):08x}{_SAVED}"))
    durable.sync_folder(written.parent)


def claim(saved: Path) -> Path:
    """Hides a file while the engine reads it, so that a file that kills the engine is never offered again. A file that
    has changed since it was saved is removed. Raises `ValueError` for such a file, and `OSError`."""
    claimed = saved.rename(saved.with_suffix(_PARTIAL))
    if f"{_checksum(claimed):08x}" != saved.stem.rpartition("-")[2]:
        claimed.unlink()
        raise ValueError(f"{saved} is not as it was saved")
    return claimed


def give_back(claimed: Path) -> None:
    claimed.rename(claimed.with_suffix(_SAVED))


def _mark(owner: str) -> str:
    return hashlib.sha256(owner.encode()).hexdigest()[:32]


def _checksum(path: Path) -> int:
    """Returns the checksum of a file. It reads 4 GiB a second, much faster than a disk."""
    checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def saved_slots(folder: Path, owner: str) -> list[SavedSlot]:
    """Returns the owner's files in a folder, the most valuable first: long prompts before short ones, and of both kinds
    the last used first. It removes a damaged file."""
    good = []
    for path in sorted(folder.glob(f"*-{_mark(owner)}-*{_SAVED}"), reverse=True):
        try:
            good.append(SavedSlot(path, prompt_of(path)))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            log.warning("a saved prompt cache is damaged and is removed: %s: %s", path, error)
            path.unlink(missing_ok=True)
    return sorted(good, key=lambda saved: saved.tokens < _LONG)


def prompt_of(path: Path) -> bytes:
    """Returns the prompt in a file's head. For a prompt with images it returns everything that identifies the prompt.
    Raises `ValueError`, `OSError`."""
    with open(path, "rb") as file:
        magic, _, words = struct.unpack("<3I", _exactly(file.read(3 * WORD), 3))
        if magic != _MAGIC or not 0 < words <= _MOST_WORDS:
            raise ValueError("no state of a sequence")
        prompt = _exactly(file.read(words * WORD), words)
    if prompt[:WORD] != b"\xff" * WORD:
        return prompt
    if words < 4:
        raise ValueError("the prompt is cut off")
    tokens = struct.unpack_from("<I", prompt, 2 * WORD)[0]
    end = (3 + tokens) * WORD
    images = prompt[end : end + WORD]
    if len(images) < WORD:
        raise ValueError("the prompt is cut off")
    return prompt[3 * WORD : end] if images == bytes(WORD) else prompt


def _exactly(data: bytes, words: int) -> bytes:
    if len(data) != words * WORD:
        raise ValueError("the file is cut off")
    return data


def superfluous(best_first: Sequence[SavedSlot], most: int) -> list[SavedSlot]:
    """Returns the files that need not be kept: files whose prompt is nine tenths or more a beginning of a better
    file's, as when a conversation went on, and files after the first `most`, which would never be restored."""
    kept: list[SavedSlot] = []
    for saved in best_first:
        most_of_it = saved.prompt[: saved.tokens * 9 // 10 * WORD]
        if len(kept) < most and not any(better.prompt.startswith(most_of_it) for better in kept):
            kept.append(saved)
    return [saved for saved in best_first if saved not in kept]
