"""Saved prompt caches on disk: what is found, what is removed, and when."""

import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from modelrunner_llamacpp import slotfiles
from modelrunner_llamacpp.slotfiles import SlotFiles

KIM, ANN = "kim#0123456789abcdef", "ann#0123456789abcdef"
MODEL, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def state(*tokens: int, images: int = 0, listed: bool = True, size: int = 0) -> bytes:
    """A file as the engine writes one, with `size` bytes of keys and values."""
    words = [-1, 1, len(tokens), *tokens, images, *([7] * images)] if listed else list(tokens)
    return struct.pack(f"<3I{len(words)}i", 0x67677371, 3, len(words), *words) + bytes(size)


def size(files: SlotFiles) -> int:
    return sum(path.stat().st_size for path in files._saved())


@pytest.fixture
def files(tmp_path: Path) -> SlotFiles:
    return SlotFiles(tmp_path / "state" / "slots", 10_000)


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()


def put(folder: Path, used: int, data: bytes, owner: str = KIM) -> Path:
    written = slotfiles.partial(folder, owner, used)
    written.write_bytes(data)
    slotfiles.publish(written)
    return next(folder.glob(f"{used:020d}-*.slot"))


def prompts(folder: Path, owner: str = KIM) -> list[tuple[int, ...]]:
    return [struct.unpack(f"<{saved.tokens}i", saved.prompt) for saved in slotfiles.saved_slots(folder, owner)]


@pytest.mark.parametrize("listed", [True, False])
def test_the_last_used_comes_first(files: SlotFiles, listed: bool) -> None:
    folder = files.folder(MODEL, "k")
    for used, token in ((9, 1), (11, 2), (10, 3)):
        put(folder, used, state(token, 5, listed=listed))
    assert prompts(folder) == [(2, 5), (3, 5), (1, 5)]


def test_each_owner_finds_its_own(files: SlotFiles) -> None:
    folder = files.folder(MODEL, "k")
    for used, owner in enumerate((KIM, ANN, "")):
        put(folder, used, state(used + 1), owner)
    assert [prompts(folder, owner) for owner in (KIM, ANN, "", "kim", "kim#")] == [[(1,)], [(2,)], [(3,)], [], []]


def test_what_has_no_owner_is_nobody_s_and_goes_at_the_next_start(files: SlotFiles) -> None:
    folder = files.folder(MODEL, "k")
    mine = put(folder, 2, state(1, 2))
    used, owner, checksum = mine.name.split("-")
    for name in (f"{used}-{checksum}", f"{used}--{checksum}", f"{used}-{owner[:8]}-{checksum}", "x.slot"):
        (folder / name).write_bytes(mine.read_bytes())
    assert [prompts(folder, owner) for owner in (KIM, "")] == [[(1, 2)], []]
    files.heal()
    assert list(folder.iterdir()) == [mine]


def test_nobody_else_may_look(files: SlotFiles) -> None:
    folder = files.folder(MODEL, "k")
    assert [stat.S_IMODE(os.stat(f).st_mode) for f in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"GGUF" + bytes(100),
        state(1, 2, 3)[:20],
        state(1, 2, 3)[:8] + struct.pack("<I", 2**31),
        struct.pack("<3I3i", 0x67677371, 3, 3, -1, 1, 1000),
        struct.pack("<3I4i", 0x67677371, 3, 4, -1, 1, 1000, 5),
    ],
)
def test_what_is_damaged_is_not_found_and_goes(files: SlotFiles, damage: bytes) -> None:
    folder = files.folder(MODEL, "k")
    bad = put(folder, 2, damage)
    put(folder, 1, state(1, 2))
    assert prompts(folder) == [(1, 2)]
    assert not bad.exists()


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:-1] + b"x"])
def test_one_that_is_not_as_it_was_saved_is_not_offered(files: SlotFiles, change: Callable[[bytes], bytes]) -> None:
    folder = files.folder(MODEL, "k")
    saved = put(folder, 1, state(1, 2, size=100))
    saved.write_bytes(change(saved.read_bytes()))
    with pytest.raises(ValueError, match="not as it was saved"):
        slotfiles.claim(saved)
    assert list(folder.iterdir()) == []


def test_what_was_half_written_is_never_found_and_goes_at_the_next_start(files: SlotFiles) -> None:
    folder = files.folder(MODEL, "k")
    slotfiles.partial(folder, KIM, 1).write_bytes(state(1, 2))
    assert slotfiles.saved_slots(folder, KIM) == []
    files.heal()
    assert not folder.exists()


def test_one_that_kills_the_engine_is_not_offered_again(files: SlotFiles) -> None:
    folder = files.folder(MODEL, "k")
    claimed = slotfiles.claim(put(folder, 1, state(1, 2)))
    assert slotfiles.saved_slots(folder, KIM) == []
    slotfiles.give_back(claimed)
    assert prompts(folder) == [(1, 2)]


def test_the_oldest_of_all_models_go_first(files: SlotFiles) -> None:
    mine, other = files.folder(MODEL, "k"), files.folder(OTHER, "k")
    oldest, newest = put(mine, 1, state(1, size=4_000)), put(mine, 3, state(3, size=4_000))
    middle = put(other, 2, state(2, size=4_000))
    files.trim()
    assert [path.exists() for path in (oldest, middle, newest)] == [False, True, True]
    assert 8_000 < size(files) <= 10_000


def test_the_bound_is_for_all_owners_together(files: SlotFiles) -> None:
    folder = files.folder(MODEL, "k")
    put(folder, 1, state(1, size=4_000), ANN)
    for used in (2, 3):
        put(folder, used, state(used, size=4_000), KIM)
    files.trim()
    assert (prompts(folder, KIM), prompts(folder, ANN)) == ([(3,), (2,)], [])


def test_without_room_nothing_stays(tmp_path: Path, files: SlotFiles) -> None:
    put(files.folder(MODEL, "k"), 1, state(1))
    SlotFiles(tmp_path / "state" / "slots", 0).heal()
    assert list((tmp_path / "state" / "slots").iterdir()) == []


def test_a_removed_model_s_files_go(files: SlotFiles) -> None:
    put(files.folder(MODEL, "k"), 1, state(1))
    kept = put(files.folder(OTHER, "k"), 1, state(1))
    files.forget(MODEL)
    files.forget("sha256:" + "c" * 64)
    assert size(files) == kept.stat().st_size


@pytest.mark.parametrize("model", ["../../etc", "sha256:../x", "sha256:" + "A" * 64, ""])
def test_a_model_id_never_leads_elsewhere(files: SlotFiles, model: str) -> None:
    with pytest.raises(ValueError, match="no model ID"):
        files.folder(model, "k")


def superfluous(folder: Path, most: int) -> list[int]:
    return [
        int(saved.path.stem.split("-")[0]) for saved in slotfiles.superfluous(slotfiles.saved_slots(folder, KIM), most)
    ]


def test_a_conversation_that_went_on_replaces_its_older_state(files: SlotFiles) -> None:
    folder = files.folder(MODEL, "k")
    put(folder, 1, state(*range(20)))
    put(folder, 2, state(*range(18), 99, 98, 97))  # its last answer was asked for again
    put(folder, 3, state(*range(10)))  # the same beginning only
    put(folder, 4, state(*range(10), *range(50, 70)))
    assert superfluous(folder, 9) == [3, 1]


def test_an_owner_s_states_replace_no_other_s(files: SlotFiles) -> None:
    folder = files.folder(MODEL, "k")
    put(folder, 1, state(*range(20)), ANN)
    put(folder, 2, state(*range(20)), KIM)
    put(folder, 3, state(*range(21)), KIM)
    assert superfluous(folder, 9) == [2]
    assert len(prompts(folder, ANN)) == 1


def test_no_more_are_kept_than_there_are_slots(files: SlotFiles) -> None:
    folder = files.folder(MODEL, "k")
    for used in range(1, 5):
        put(folder, used, state(used, 7, 7))
    assert superfluous(folder, 2) == [2, 1]


def test_short_prompts_never_push_out_a_long_one(files: SlotFiles) -> None:
    folder = files.folder(MODEL, "k")
    put(folder, 1, state(1, *range(300)))
    put(folder, 2, state(2, *range(256)))
    for used in range(3, 9):
        put(folder, used, state(used, *range(254)))
    assert [prompt[0] for prompt in prompts(folder)] == [2, 1, 8, 7, 6, 5, 4, 3]
    assert superfluous(folder, 3) == [7, 6, 5, 4, 3]


def test_prompts_with_different_images_are_never_taken_for_the_same(files: SlotFiles) -> None:
    folder = files.folder(MODEL, "k")
    put(folder, 1, state(*range(20), images=1))
    put(folder, 2, state(*range(20), 20, images=1))
    assert superfluous(folder, 9) == []
