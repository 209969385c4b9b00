"""Layers on devices: sizes and room in, placements out."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.backend import BackendContext
from modelrunner.errors import BadRequest
from modelrunner.types import ModelHeader, RequiredMemory, RunSpec, Tensor, Variant
from modelrunner_llamacpp import LlamaCppBackend, args, memory, split
from modelrunner_llamacpp.engines import EngineKind
from modelrunner_llamacpp.hparams import Header
from modelrunner_llamacpp.memory import MIB
from tests.llamacpp.models import SMOLLM2, bundle, spec

GIB = 1 << 30
LAYERS = 30


def model() -> RunSpec:
    """30 layers of 100 MiB, and an output and an embedding of 200."""
    blocks = [Tensor(f"blk.{i}.ffn_up.weight", (1,), "F16", 100 * MIB) for i in range(LAYERS)]
    ends = [Tensor(name, (1,), "F16", 200 * MIB) for name in ("token_embd.weight", "output.weight")]
    made = bundle(SMOLLM2)
    run = spec(replace(made, header=ModelHeader(SMOLLM2, (*blocks, *ends)), size=3410 * MIB), context=2048, parallel=1)
    return replace(run, flags=("--ubatch-size", "64"))


def required(run: RunSpec) -> RequiredMemory:
    return memory.required(run, EngineKind.NATIVE, args.effective(run))


def variants(run: RunSpec, *rooms: int) -> list[Variant]:
    def place(smaller: RunSpec) -> list[list[split.Placement]]:
        return memory.placements(smaller, args.effective(smaller), rooms)

    run = memory.placed_by_hand(run, args.effective(run), rooms)
    return split.variants(run, place, required, Header(run.bundle.header).layers)


def placed(variant: Variant) -> tuple[int, ...]:
    return memory.placement(args.effective(variant.spec), LAYERS + 1)


def test_without_a_device_there_is_one_way() -> None:
    assert variants(model()) == [Variant(model(), required(model()))]


def test_all_of_it_goes_to_the_device_that_has_the_room_and_then_less_of_it() -> None:
    found = variants(model(), 16 * GIB)
    assert [v.label for v in found] == ["", *(f"{n} of 30 layers on the GPU" for n in (22, 14, 6, 0))]
    assert [placed(v) for v in found] == [(31,), (23,), (15,), (7,), (0,)]
    assert [v.memory.vram for v in found] == sorted((v.memory.vram for v in found), reverse=True)
    assert found[0].memory.ram < 1 * GIB
    assert found[-1].memory == RequiredMemory(required(model()).ram, (), required(model()).shared)


def test_what_does_not_fit_is_split() -> None:
    first = variants(model(), 2 * GIB)[0]
    assert first.label == "14 of 30 layers on the GPU"
    assert first.memory.vram[0] <= 2 * GIB
    assert placed(first) == (15,)


def test_two_devices_take_together_what_neither_takes_alone() -> None:
    first = variants(model(), 2 * GIB, 3 * GIB)[0]
    assert first.label == ""
    assert sum(placed(first)) == 31
    assert first.spec.flags[-2:] == ("--tensor-split", ",".join(map(str, placed(first))))
    assert first.memory.fits(RequiredMemory(1 << 40, (2 * GIB, 3 * GIB)))


def test_a_split_follows_the_free_memory_of_unequal_devices() -> None:
    """And fills none to its end, where prompts may need more than was thought."""
    rooms = 2 * GIB, 3 * GIB, 3 * GIB
    found = [variant for variant in variants(model(), *rooms) if not variant.label]
    assert len(found) == 3  # any two of them
    for variant in found:
        used = [need / room for need, room in zip(variant.memory.vram, rooms, strict=True) if need]
        assert len(used) == 2
        assert max(used) - min(used) < 0.1
        assert max(used) < 0.95


def test_any_device_that_can_take_all_is_a_way_and_the_main_one_comes_first() -> None:
    devices = (16 * GIB, 8 * GIB)
    assert [placed(v) for v in variants(model(), *devices)][:2] == [(31,), (0, 31)]
    main = replace(model(), options={"main-device": 1})
    assert [placed(v) for v in variants(main, *devices)][:2] == [(0, 31), (31,)]
    only = replace(model(), options={"devices": [1]})
    assert {placed(v)[0] for v in variants(only, *devices) if sum(placed(v))} == {0}


@pytest.mark.parametrize(("layers", "expected"), [(0, (0,)), (10, (10,)), (99, (31,))])
def test_a_number_of_layers_that_somebody_chose_is_that_and_nothing_else(layers: int, expected: tuple[int]) -> None:
    for room in (1 * GIB, 16 * GIB):
        found = variants(replace(model(), gpu_layers=layers), room)
        assert [(placed(v) or (0,), v.label) for v in found] == [(expected, "")]


def test_a_split_that_somebody_chose_stays() -> None:
    run = replace(model(), flags=("--n-gpu-layers", "20", "--tensor-split", "3,1"))
    (only,) = variants(run, 16 * GIB, 16 * GIB)
    assert only.spec == run
    assert placed(only) == (15, 5)
    assert min(only.memory.vram) > 500 * MIB


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--tensor-split", "1,1"), (16, 15)),
        (("--split-mode", "none", "--main-gpu", "1"), (0, 31)),
        (("--split-mode", "row"), (21, 10)),
    ],
)
def test_devices_that_flags_choose_are_counted(flags: tuple[str, ...], expected: tuple[int, ...]) -> None:
    """Nobody has said how many layers: all of them, in shares of the free memory."""
    (only,) = variants(replace(model(), flags=flags), 4 * GIB, 2 * GIB)
    assert placed(only) == expected
    assert sum(only.memory.vram) > 3 * GIB
    assert [size > 0 for size in only.memory.vram] == [count > 0 for count in expected]


def test_a_main_device_by_its_flag_is_tried_first() -> None:
    found = variants(replace(model(), flags=("--main-gpu", "1")), 16 * GIB, 8 * GIB)
    assert [placed(v) for v in found][:2] == [(0, 31), (31,)]


@pytest.mark.parametrize("flags", [("--tensor-split", "1,1,1"), ("--main-gpu", "2")])
def test_a_device_that_flags_name_and_is_not_there(flags: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest, match=r"llama\.cpp has devices 0 to 1 here"):
        variants(replace(model(), flags=flags), 16 * GIB, 16 * GIB)


@pytest.mark.parametrize("options", [{"devices": [3]}, {"main-device": 0}])
def test_a_device_that_somebody_chose_where_there_is_none(options: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=r"there is no device \d for llama\.cpp here, but the processor alone"):
        variants(replace(model(), options=options))


def test_less_context_comes_after_what_was_asked_for() -> None:
    run = replace(model(), context_size=8192, min_context_size=3000)
    assert [v.label for v in variants(run)] == ["", "context 4096 of 8192", "context 3000 of 8192"]
    labels = [v.label for v in variants(run, 16 * GIB)]
    assert labels[5:7] == ["context 4096 of 8192", "0 of 30 layers on the GPU, context 4096 of 8192"]


def test_fewer_sequences_come_before_less_context() -> None:
    run = replace(model(), parallel=4, context_size=2048, min_context_size=1024)
    found = variants(run)
    assert [(v.spec.parallel, v.spec.context_size) for v in found] == [(4, 2048), (2, 2048), (1, 2048), (1, 1024)]
    assert [v.label for v in found] == [
        *("", "2 of 4 sequences", "1 of 4 sequences"),
        "1 of 4 sequences, context 1024 of 2048",
    ]
    needed = [v.memory.ram for v in found]
    assert needed == sorted(needed, reverse=True)


def test_a_run_that_may_grow_gives_up_its_cache_of_prompts_before_its_context() -> None:
    run = replace(model(), parallel=4, context_size=2048, min_context_size=1024, grows=True)
    found = variants(run)
    assert [(v.spec.parallel, v.label) for v in found] == [
        *((4, ""), (2, "2 of 4 sequences"), (1, ""), (1, "no cache of prompts")),
        (1, "no cache of prompts, context 1024 of 2048"),
    ]
    assert [memory.cache_of_other_prompts(v.spec) > 0 for v in found] == [False, False, True, False, False]


def test_fewer_sequences_come_before_fewer_layers() -> None:
    """A device has room for all layers with one sequence, but not with four."""
    run = replace(model(), parallel=4, context_size=8192)
    alone = variants(replace(run, parallel=1), 16 * GIB)[0].memory.vram[0]
    labels = [v.label for v in variants(run, alone)]
    assert labels[0] == "1 of 4 sequences"
    assert labels[1].endswith("of 30 layers on the GPU")


def test_a_projector_is_on_the_first_device_and_a_draft_with_the_most_layers() -> None:
    run = model()
    eyes = Tensor("v.blk.0.attn_q.weight", (1,), "F16", 300 * MIB)
    seeing = replace(run.bundle, header=ModelHeader(SMOLLM2, (*run.bundle.header.tensors, eyes)), size=3710 * MIB)
    plain, with_eyes, drafted = (
        variants(r, 16 * GIB)[0].memory for r in (run, replace(run, bundle=seeing), replace(run, draft=bundle(SMOLLM2)))
    )
    assert with_eyes.vram[0] - plain.vram[0] == 300 * MIB
    assert with_eyes.ram == plain.ram
    assert drafted.vram[0] - plain.vram[0] > bundle(SMOLLM2).size


@pytest.mark.parametrize(("listed", "ways"), [("  CUDA0: a GPU (24576 MiB)", 5), ("  (none)", 1)])
async def test_an_engine_that_can_use_no_device_gets_none(listed: str, ways: int, tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\ncase $1 in --version) echo 'version: b7000';; *) echo '{listed}';; esac\n")
    program.chmod(0o755)
    backend = LlamaCppBackend(BackendContext(tmp_path, tmp_path, tmp_path, {"llama_server": program}))
    found = await backend.variants(model(), RequiredMemory(64 * GIB, (16 * GIB,)))
    assert len(found) == ways
    assert bool(found[0].memory.vram) == (ways > 1)


sizes = st.integers(0, 500)


@given(
    st.lists(sizes, min_size=1, max_size=40),
    st.integers(0, 100),
    st.lists(st.integers(0, 5000), min_size=1, max_size=4),
)
def test_no_device_gets_more_than_it_has(blocks: list[int], each: int, rooms: list[int]) -> None:
    for way in chain(*split.placements(blocks, each, rooms)):
        start = len(blocks) - sum(way)
        for count, room in zip(way, rooms, strict=True):
            assert not count or sum(blocks[start : start + count]) + each <= room
            start += count


@given(
    st.lists(sizes, min_size=1, max_size=40),
    st.integers(0, 100),
    st.lists(st.integers(0, 5000), min_size=1, max_size=4),
)
def test_more_room_never_means_fewer_layers(blocks: list[int], each: int, rooms: list[int]) -> None:
    most = sum(split.fill(blocks, each, rooms))
    assert most <= len(blocks)
    assert sum(split.fill(blocks, each, [room + 100 for room in rooms])) >= most
    assert split.placements(blocks, each, rooms)[-1] == [(0,) * len(rooms)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
def test_llama_cpp_cuts_where_the_flags_say(way: list[int]) -> None:
    flags = split.flags(tuple(way))
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    found = memory.placement(options, sum(way))
    assert (*found, *[0] * (len(way) - len(found))) == tuple(way)
