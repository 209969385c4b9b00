"""Which of a model's layers go to which device, and the smaller ways to run it. Pure.

Devices have the engine's numbers. llama.cpp puts the last layers on devices, cut into one piece for each device in the
order of their numbers, the output after the last (load_tensors of llama-model.cpp).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from modelrunner import RequiredMemory, RunSpec, Variant

Placement = tuple[int, ...]  # layers on each device, the output counted as one


def fill(blocks: Sequence[int], each: int, rooms: Sequence[int]) -> Placement:
    """As many of the last `blocks` as fit: bytes of each layer, the output's last. `each` is what a device in use needs
    besides, `rooms` what the devices have, 0 for one that is not to be used."""
    left, counts = list(blocks), [0] * len(rooms)
    for device in reversed(range(len(rooms))):
        free = rooms[device] - each
        while left and left[-1] <= free:
            free -= left.pop()
            counts[device] += 1
    return tuple(counts)


def alone(blocks: Sequence[int], each: int, rooms: Sequence[int], device: int) -> Placement:
    """The same with one device only."""
    return fill(blocks, each, [room if i == device else 0 for i, room in enumerate(rooms)])


def placements(
    blocks: Sequence[int], each: int, rooms: Sequence[int], *, main: int | None = None, exactly: int | None = None
) -> list[Placement]:
    """Everything on one device, `main` first, for each that has the room; else on several, as much as fits; then three
    quarters of that, half, a quarter, nothing. `exactly` so many layers, the output among them: that and nothing else,
    on the device with the most room where it fits nowhere."""
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
    """Every single device that can take the last `count` blocks; if none can, all together; nothing if not even so."""
    last = blocks[len(blocks) - count :]
    singles = [_on(device, count, len(rooms)) for device in order if sum(alone(last, each, rooms, device)) == count]
    together = fill(last, each, rooms)
    return singles or ([together] if sum(together) == count else [])


def _on(device: int, count: int, devices: int) -> Placement:
    return tuple(count if i == device else 0 for i in range(devices))


def flags(placement: Placement) -> tuple[str, ...]:
    """What tells llama.cpp to place its layers so."""
    used = [device for device, count in enumerate(placement) if count]
    layers = ("--n-gpu-layers", str(sum(placement)))
    if len(used) > 1:
        return (*layers, "--split-mode", "layer", "--tensor-split", ",".join(map(str, placement)))
    return (*layers, "--split-mode", "none", "--main-gpu", str(used[0] if used else -1))


def contexts(spec: RunSpec) -> Iterator[int]:
    """What was asked for, then halves of it, down to the least that is allowed."""
    size = spec.context_size
    yield size
    while spec.min_context_size is not None and size > spec.min_context_size:
        size = max(size // 2, spec.min_context_size)
        yield size


def variants(
    spec: RunSpec,
    place: Callable[[RunSpec], list[Placement]],
    required: Callable[[RunSpec], RequiredMemory],
    layers: int,
) -> list[Variant]:
    """The run with every placement that `place` gives for it, none of them where there are no devices; and with less
    context, where that is allowed, in the first and the last placement."""
    found = []
    for context in contexts(spec):
        smaller = replace(spec, context_size=context)
        ways = place(smaller)
        for way in ways if context == spec.context_size else [*ways[:1], *ways[1:][-1:]]:
            placed = replace(smaller, flags=(*spec.flags, *flags(way)))
            found.append(Variant(placed, required(placed), _label(spec, context, way, layers)))
        if not ways:
            found.append(Variant(smaller, required(smaller), _label(spec, context, None, layers)))
    return found


def _label(spec: RunSpec, context: int, placement: Placement | None, layers: int) -> str:
    said = []
    if placement is not None and spec.gpu_layers is None and sum(placement) <= layers:
        said.append(f"{max(sum(placement) - 1, 0)} of {layers} layers on the GPU")
    if context != spec.context_size:
        said.append(f"context {context} of {spec.context_size}")
    return ", ".join(said)
