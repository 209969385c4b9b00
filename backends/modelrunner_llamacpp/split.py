"""Places a model's layers on devices, and finds the smaller ways to run it. Pure.

Devices have the engine's numbers. llama.cpp puts the last layers on devices, cut into one piece for each device in the
order of their numbers, the output after the last (load_tensors of llama-model.cpp)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from modelrunner.sdk import RequiredMemory, RunSpec, Variant

Placement = tuple[int, ...]  # layers on each device, the output counted as one


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


def alone(blocks: Sequence[int], each: int, rooms: Sequence[int], device: int) -> Placement:
    """Returns the same as `fill` for one device alone."""
    return fill(blocks, each, [room if i == device else 0 for i, room in enumerate(rooms)])


def placements(
    blocks: Sequence[int], each: int, rooms: Sequence[int], *, main: int | None = None, exactly: int | None = None
) -> list[Placement]:
    """Returns placements in order of preference: everything on one device, `main` first, for each device with enough
    room; else as much as fits on several; then three quarters of that, half, a quarter, nothing. With `exactly`, only
    so many layers (with the output), on the device with the most room if they fit nowhere."""
    order = sorted(range(len(rooms)), key=lambda i: (i != main, -rooms[i], i))
    if exactly is not None:
        wanted = min(exactly, len(blocks))
        return _ways(blocks, each, rooms, order, wanted) or [_on(order[0], wanted, len(rooms))]
    singles = [sum(alone(blocks, each, rooms, device)) for device in order]
    most = max(sum(fill(blocks, each, rooms)), *singles)
    found = _ways(blocks, each, rooms, order, most) if most else []
    for quarters in (3, 2, 1):
        fewer = most * quarters // 4
        if fewer and sum(found[-1]) > fewer:
            found += _ways(blocks, each, rooms, order, fewer)[:1]
    return [*found, (0,) * len(rooms)]


def _ways(blocks: Sequence[int], each: int, rooms: Sequence[int], order: Sequence[int], count: int) -> list[Placement]:
    """Returns every single device that can take the last `count` blocks. If none can, it returns all devices together,
    and nothing if they cannot take them either."""
    last = blocks[len(blocks) - count :]
    singles = [_on(device, count, len(rooms)) for device in order if sum(alone(last, each, rooms, device)) == count]
    together = fill(last, each, rooms)
    return singles or ([together] if sum(together) == count else [])


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
    """Yields the configured run, then with half the sequences, down to one, then that one with half the context, down
    to the allowed minimum. With fewer sequences requests wait; with less context long ones fail."""
    yield spec
    while spec.parallel > 1:
        spec = replace(spec, parallel=spec.parallel // 2)
        yield spec
    while spec.min_context_size is not None and spec.context_size > spec.min_context_size:
        spec = replace(spec, context_size=max(spec.context_size // 2, spec.min_context_size))
        yield spec


def variants(
    spec: RunSpec,
    place: Callable[[RunSpec], list[Placement]],
    required: Callable[[RunSpec], RequiredMemory],
    layers: int,
) -> list[Variant]:
    """Returns the run in every size that `sizes` yields. Without devices `place` returns no placements, and each size
    is one variant. With devices, variants with all layers on devices and the whole context come first, beginning with
    the most sequences; then the configured run in its other placements; then the smaller sizes in their first and last
    placement."""
    whole: list[Variant] = []
    rest: list[Variant] = []
    for size in sizes(spec):
        ways = place(size)
        for way in ways if size is spec else [*ways[:1], *ways[1:][-1:]]:
            placed = replace(size, flags=(*spec.flags, *flags(way)))
            variant = Variant(placed, required(placed), _label(spec, size, way, layers))
            asked = size.context_size == spec.context_size
            (whole if asked and sum(way) > layers else rest).append(variant)
        if not ways:
            whole.append(Variant(size, required(size), _label(spec, size, None, layers)))
    return whole + rest


def _label(spec: RunSpec, size: RunSpec, placement: Placement | None, layers: int) -> str:
    differences = []
    if placement is not None and spec.gpu_layers is None and sum(placement) <= layers:
        differences.append(f"{max(sum(placement) - 1, 0)} of {layers} layers on the GPU")
    if size.parallel != spec.parallel:
        differences.append(f"{size.parallel} of {spec.parallel} sequences")
    if size.context_size != spec.context_size:
        differences.append(f"context {size.context_size} of {spec.context_size}")
    return ", ".join(differences)
