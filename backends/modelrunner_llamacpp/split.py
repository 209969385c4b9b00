"""Places a model's layers on devices, and finds the smaller ways to run it. Pure.

Devices have the engine's numbers. llama.cpp puts the last layers on devices, cut into one piece for each device in the
order of their numbers, the output after the last (load_tensors of llama-model.cpp)."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice

from modelrunner.sdk import RequiredMemory, RunSpec, Variant

Placement = tuple[int, ...]  # layers on each device, the output counted as one
_MOST_SETS = 64  # of devices that are tried for one run


def fill(blocks: Sequence[int], each: int, rooms: Sequence[int]) -> Placement:
    """Returns how many of the last `blocks` fit on each device. `blocks` are the bytes of each layer, the output's
    last; `each` is the further need of a device in use, and `rooms` are the free bytes of the devices, 0 for a device
    that is not used."""
    left, counts = list(blocks), [0] * len(rooms)
    for device in reversed(range(len(rooms))):
        free = rooms[device] - each
        while left and left[-1] <= free:
            free -= left.pop()
            counts[device] += 1
    return tuple(counts)


def placements(
    blocks: Sequence[int], each: int, rooms: Sequence[int], *, main: int | None = None, exactly: int | None = None
) -> list[list[Placement]]:
    """Returns placements in order of preference; those of one list are the same run on other devices. First everything
    on one device with enough room, `main` before the others, else on as few devices as can take it, in shares of their
    room, else as much as fits; then three quarters of that, half, a quarter, nothing. With `exactly`, only so many
    layers (with the output), on the device with the most room if they fit nowhere."""
    if exactly is not None:
        wanted = min(exactly, len(blocks))
        roomiest = max(range(len(rooms)), key=lambda i: (i == main, rooms[i]))
        return _ways(blocks, each, rooms, main, wanted) or [[_on(roomiest, wanted, len(rooms))]]
    most = sum(fill(blocks, each, rooms))
    most = max(most, *[sum(_within(blocks, each, rooms, (device,))) for device in range(len(rooms))])
    ways = _ways(blocks, each, rooms, main, most) if most else []
    for quarters in (3, 2, 1):
        fewer = most * quarters // 4
        if fewer and sum(ways[-1][0]) > fewer:
            ways += _ways(blocks, each, rooms, main, fewer)[:1]
    return [*ways, [(0,) * len(rooms)]]


def _ways(
    blocks: Sequence[int], each: int, rooms: Sequence[int], main: int | None, count: int
) -> list[list[Placement]]:
    """Returns the ways to place the last `count` blocks on as few devices as can take them."""
    last = blocks[len(blocks) - count :]
    for size in range(1, len(rooms) + 1):
        sets = islice(combinations(range(len(rooms)), size), _MOST_SETS)
        whole = [chosen for chosen in sets if sum(_within(last, each, rooms, chosen)) == count]
        if ways := [_even(last, each, rooms, chosen) for chosen in whole]:
            preferred = [way for way in ways if size == 1 and main is not None and way[main]]
            return [each for each in (preferred, [way for way in ways if way not in preferred]) if each]
    if sum(fill(last, each, rooms)) == count:
        return [[_even(last, each, rooms, range(len(rooms)))]]
    return []


def _even(blocks: Sequence[int], each: int, rooms: Sequence[int], devices: Collection[int]) -> Placement:
    """Returns the placement of all blocks on these devices, which can take them, that leaves every device about the
    same part of its room free."""
    room = sum(max(0, rooms[device] - each) for device in devices)
    for percent in range(100 * sum(blocks) // max(1, room), 100):
        parts = [each + (free - each) * percent // 100 if free > each else 0 for free in rooms]
        if sum(way := _within(blocks, each, parts, devices)) == len(blocks):
            return way
    return _within(blocks, each, rooms, devices)


def _within(blocks: Sequence[int], each: int, rooms: Sequence[int], devices: Collection[int]) -> Placement:
    """Returns the same as `fill` for these devices alone."""
    return fill(blocks, each, [room if device in devices else 0 for device, room in enumerate(rooms)])


def _on(device: int, count: int, devices: int) -> Placement:
    return tuple(count if i == device else 0 for i in range(devices))


def flags(placement: Placement) -> tuple[str, ...]:
    """Returns llama.cpp's flags for such a placement."""
    used = [device for device, count in enumerate(placement) if count]
    layers = ("--n-gpu-layers", str(sum(placement)))
    if len(used) > 1:
        return (*layers, "--split-mode", "layer", "--tensor-split", ",".join(map(str, placement)))
    return (*layers, "--split-mode", "none", "--main-gpu", str(used[0] if used else -1))


def sizes(spec: RunSpec) -> Iterator[RunSpec]:
    """Yields the configured run, then with half the sequences, down to one; of one that may grow, which keeps a cache
    of prompts in place of its other sequences, then without this cache; then that one with half the context, down to
    the allowed minimum. With fewer sequences requests wait; with less context long ones fail."""
    yield spec
    several = spec.parallel > 1
    while spec.parallel > 1:
        spec = replace(spec, parallel=spec.parallel // 2)
        yield spec
    if several and spec.grows:
        yield replace(spec, grows=False)
    spec = replace(spec, grows=False)
    while spec.min_context_size is not None and spec.context_size > spec.min_context_size:
        spec = replace(spec, context_size=max(spec.context_size // 2, spec.min_context_size))
        yield spec


def variants(
    spec: RunSpec,
    place: Callable[[RunSpec], list[list[Placement]]],
    required: Callable[[RunSpec], RequiredMemory],
    layers: int,
) -> list[Variant]:
    """Returns the run in every size that `sizes` yields. Without devices `place` returns no placements, and each size
    is one variant. With devices, variants with all layers on devices and the whole context come first, beginning with
    the most sequences; then the configured run in its other placements; then the smaller sizes in their first and last
    placement. A run that may grow begins with one sequence, in all its placements too. Placements of one list have one
    rank."""
    whole: list[list[Variant]] = []
    rest: list[list[Variant]] = []
    for size in sizes(spec):
        lists = place(size)
        full = size is spec or (size.grows and size.parallel == 1)
        for ways in lists if full else [*lists[:1], *lists[1:][-1:]]:
            placed = [(way, replace(size, flags=(*spec.flags, *flags(way)))) for way in ways]
            ranked = [Variant(run, required(run), _label(spec, size, way, layers)) for way, run in placed]
            is_whole = size.context_size == spec.context_size
            (whole if is_whole and sum(ways[0]) > layers else rest).append(ranked)
        if not lists:
            whole.append([Variant(size, required(size), _label(spec, size, None, layers))])
    return [replace(each, rank=rank) for rank, ranked in enumerate(whole + rest) for each in ranked]


def _label(spec: RunSpec, size: RunSpec, placement: Placement | None, layers: int) -> str:
    differences = []
    if placement is not None and spec.gpu_layers is None and sum(placement) <= layers:
        differences.append(f"{max(sum(placement) - 1, 0)} of {layers} layers on the GPU")
    if size.parallel != spec.parallel and not (spec.grows and size.parallel == 1):
        differences.append(f"{size.parallel} of {spec.parallel} sequences")
    if spec.parallel > 1 and size.grows != spec.grows:
        differences.append("no cache of prompts")
    if size.context_size != spec.context_size:
        differences.append(f"context {size.context_size} of {spec.context_size}")
    return ", ".join(differences)
