"""The memory that each model needs: the measured figure of a run, else the backend's estimate. `Account` adds the
budget and the measurements of the scheduler's runners."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, islice, product
from math import comb
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from modelrunner.backend import Backend, Grows, HasVariants, Versioned
from modelrunner.errors import EngineFailed, ModelRunnerError, Unavailable
from modelrunner.jsonfile import JsonFile
from modelrunner.plugins.isolation import call_backend, interface_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler.host import Held, Host
from modelrunner.scheduler.slots import RunnerSlot
from modelrunner.scheduler.state import HostedVariant, Phase, RunPlace
from modelrunner.scheduler.target import Target
from modelrunner.types import RequiredMemory, RunSpec, Variant

_FORMAT: Final = 4
_MAX_ENTRIES = 4096
_MOST_TOGETHER = 64  # ways of a run over so many hosts that a plan knows
HERE = "here"
"""How the settings of a model name the machine of the daemon among the hosts."""
log = logging.getLogger(__name__)


class _LedgerFile(msgspec.Struct, frozen=True):
    format: Literal[4]  # counts up when figures or their keys get another meaning
    figures: dict[str, RequiredMemory]
    """The measured memory of a run at a full context."""


class Ledger:
    """Figures are kept in `path` (none: in memory only) per backend, its version and settings, model, mode, context,
    parallel, flags, options, draft and its tokens, and kind of hardware (`Host.kind`): a figure of another combination
    says nothing about this one."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = JsonFile(path, _LedgerFile, cache=True) if path is not None else None
        content = self._file.load() if self._file is not None else None
        self._known = content.figures if content is not None else {}
        self._estimates: dict[str, RequiredMemory] = {}

    async def required(self, backend: Backend, spec: RunSpec, kind: str = "") -> RequiredMemory:
        """Bytes to count for a run: the measured figure, else the backend's estimate."""
        entry = await _entry(backend, spec, kind)
        if entry not in self._known and entry not in self._estimates:
            self._estimates[entry] = await backend.required_memory(spec)
        return self._counts(entry)

    async def variants(
        self,
        backend: Backend,
        spec: RunSpec,
        budget: RequiredMemory,
        kind: Callable[[tuple[int, ...]], str],
        numbers: tuple[int, ...] | None = None,
    ) -> list[Variant]:
        """The backend's ways to run it, the preferred one first, each with the bytes to count for it. `kind` and
        `numbers` (`Host.numbers`) are of the host with that budget."""
        varies = interface_of(backend, HasVariants)
        room = budget if numbers is None else replace(budget, vram=_picked(budget.vram, numbers))
        variants = await varies.variants(spec, room) if varies else [Variant(spec, await backend.required_memory(spec))]
        if numbers is not None:
            variants = [_numbered(variant, numbers) for variant in variants]
        version, counted = await _version(backend), list[Variant]()
        for variant in variants:
            if variant.hosts == 1:  # a run over several is not measured
                entry = _entry_of(backend, version, variant.spec, kind(variant.memory.devices))
                self._estimates[entry] = variant.memory
                variant = replace(variant, memory=self._counts(entry))
            counted.append(variant)
        return counted

    def _counts(self, entry: str) -> RequiredMemory:
        return self._known[entry] if entry in self._known else self._estimates[entry]

    async def record(
        self, backend: Backend, spec: RunSpec, measured: RequiredMemory, kind: str = "", *, fresh: bool = False
    ) -> RequiredMemory:
        """Records the measured memory of a run, and returns the memory that counts for such a run from now on: the most
        that was ever measured. A `fresh` run has only loaded its model; the growth that its backend expects is added.
        Devices that could not be measured keep their figure. Raises `ValueError` if the growth is no valid figure."""
        if fresh:
            grows = interface_of(backend, Grows)
            measured += await call_backend(grows.growth, spec) if grows else RequiredMemory(0)
            if not _is_valid(measured):
                raise ValueError(f"growth() gave no valid figure: {measured!r}")
        entry = await _entry(backend, spec, kind)
        known = self._known.get(entry)
        if known is not None:
            measured = known.most(measured)
        elif not measured.vram:
            measured = replace(measured, vram=self._estimates.get(entry, RequiredMemory(0)).vram)
        self._keep(entry, measured)
        return measured

    def _keep(self, entry: str, figure: RequiredMemory) -> None:
        before = self._known.pop(entry, None)
        self._known[entry] = figure  # at the end: the newest are kept longest
        if figure != before:
            self._write()

    def _write(self) -> None:
        while len(self._known) > _MAX_ENTRIES:
            del self._known[next(iter(self._known))]
        if self._file is not None:
            self._file.save(_LedgerFile(_FORMAT, self._known))


def _numbered(variant: Variant, numbers: Sequence[int]) -> Variant:
    """Returns the variant with the figures of the host's devices."""
    memory, part = [replace(m, vram=_spread(m.vram, numbers)) for m in (variant.memory, variant.part)]
    return replace(variant, memory=memory, part=part)


def _picked(vram: Sequence[int], numbers: Sequence[int]) -> tuple[int, ...]:
    """Returns the figures of an engine's devices, in its order, out of those of the host."""
    return tuple([vram[number] if 0 <= number < len(vram) else 0 for number in numbers])


def _spread(vram: Sequence[int], numbers: Sequence[int]) -> tuple[int, ...]:
    """Returns the figures of the host's devices, out of those of an engine's. A device that the engine does not have is
    left as it is, after the host's: it fits nowhere."""
    last = max(numbers, default=-1)
    vector = [0] * (1 + last)
    for number, size in zip(numbers, vram, strict=False):
        if number >= 0:
            vector[number] = size
    return (*vector, *vram[len(numbers) :]) if any(vram) else ()


async def _entry(backend: Backend, spec: RunSpec, kind: str) -> str:
    return _entry_of(backend, await _version(backend), spec, kind)


async def _version(backend: Backend) -> str:
    versioned = interface_of(backend, Versioned)
    return await call_backend(versioned.version) if versioned else ""


def _entry_of(backend: Backend, version: str, spec: RunSpec, kind: str) -> str:
    parts: list[Any] = [backend.name, version, kind, spec.model_id, spec.mode, spec.context_size]
    parts += [spec.parallel, spec.grows]  # of one sequence, one that grows keeps prompts in place of the others
    parts += [backend.settings.model_dump_json(), spec.gpu_layers]
    parts += [spec.flags, sorted(spec.options.items())]
    parts += [spec.draft.model_id if spec.draft else None, spec.mtp, spec.draft_tokens]
    parts += [sorted(spec.environment.items())]  # with the flags it says where the run is
    return json.dumps(parts, default=str)


class Account:
    """The scheduler's account of memory: its budget, what a run needs, and what a runner was measured to hold. A
    backend that fails, or gives no valid figure, raises `EngineFailed` that names it; a wrong measurement is logged and
    does not count."""

    def __init__(self, registry: BackendRegistry, hosts: Mapping[str, Host], ledger: Ledger) -> None:
        self._registry = registry
        self._hosts = hosts
        self._ledger = ledger

    def budgets(self, slots: Iterable[RunnerSlot]) -> dict[str, RequiredMemory]:
        """The memory that all runners of a host together may hold, for each host that answers; `slots` are the present
        runners."""
        held: dict[str, list[Held]] = {name: [] for name in self._hosts}
        for slot in slots:
            for host, memory in zip(slot.option.place.hosts, slot.memory.each, strict=True):
                held[host].append(Held(slot.runner, memory))
        budgets = {name: host.budget(held[name]) for name, host in self._hosts.items()}
        return {name: budget for name, budget in budgets.items() if budget is not None}

    async def variants(self, target: Target, budgets: Mapping[str, RequiredMemory]) -> list[HostedVariant]:
        """The ways to run the target, those of each host together, the preferred one first. Raises `Unavailable` if
        none of the hosts is there that may run it."""
        model, backend = target.model_id, target.key.backend
        hosts = [host for name in budgets if not (host := self._hosts[name]).lacks(backend) and _may_run(host, target)]
        if target.hosts and not hosts:
            where = ", ".join(target.hosts)
            raise Unavailable(
                f"{target.name} may run on {where} alone, and no such host is there with its engine: `modelrunner "
                "hosts list` shows the hosts"
            )
        hosted, alike = list[HostedVariant](), dict[object, list[Variant]]()  # hosts that are alike have the same ways
        shared = dict[int, dict[str, list[Variant]]]()  # by the number of hosts, and by host
        refused, of_several = None, False
        for host in hosts:
            budget, numbers = budgets[host.name], host.numbers(backend)
            like = budget, numbers, host.kind(tuple(range(len(host.devices()))))
            if (variants := alike.get(like)) is None:
                try:
                    variants = await self._variants(target, host, budget)
                except ModelRunnerError as error:  # it cannot run there, or what it tells is wrong; another one may
                    refused, variants = error, []
                alike[like] = variants
            fetches = not host.has(model)
            hosted += [HostedVariant(each, host.name, fetches) for each in variants if each.hosts == 1]
            for each in [each for each in variants if each.hosts > 1]:
                of_several = True
                if host.joins(model, each.memory.devices):
                    shared.setdefault(each.hosts, {}).setdefault(host.name, []).append(each)
        for number, offers in shared.items():
            if number > len(offers):
                continue
            together = islice(_together(number, offers), _MOST_TOGETHER)
            hosted += [each._replace(fetches=not self._hosts[each.host].has(model)) for each in together]
        if not hosted and refused is not None and not of_several:
            raise refused
        if not hosted and of_several:
            raise Unavailable(
                f"{target.name} runs over several hosts, and not as many are there with the devices for it: "
                "`modelrunner hosts list` shows them; all must read the same folder of models (`shared = true`)"
            )
        return hosted

    async def _variants(self, target: Target, host: Host, budget: RequiredMemory) -> list[Variant]:
        name = target.key.backend
        backend = self._registry.get(name)
        try:
            variants = await self._ledger.variants(backend, target.spec, budget, host.kind, host.numbers(name))
        except ModelRunnerError:
            raise
        except Exception as error:
            log.error("the backend %s failed to estimate %s", name, target.name, exc_info=error)
            what = f"{type(error).__name__}: {error}"
            raise EngineFailed(f"the backend {name} failed to estimate the memory of {target.name}: {what}") from error
        figures = [memory for variant in variants for memory in (variant.memory, variant.part)]
        wrong = [memory for memory in figures if not _is_valid(memory)]
        if wrong or not variants:
            shown = repr(wrong[0]) if wrong else "nothing"
            raise EngineFailed(f"the backend {name} gave no valid memory estimate of {target.name}: {shown}")
        return variants

    async def seen(self, slot: RunnerSlot) -> RequiredMemory | None:
        """The memory that the runner holds now, None if it cannot be measured. Does not count for its next load."""
        measured = await slot.runner.memory()
        return measured if _is_valid(measured) else None

    async def measure(self, slot: RunnerSlot, *, fresh: bool) -> bool:
        """Measures the runner's memory, and counts it from now on; `fresh` when it has only loaded its model. False if
        the memory cannot be measured, or if the runner is ending and holds less than before."""
        measured = None if slot.option.place.others else await self.seen(slot)  # its workers are not our processes
        if measured is None or slot.phase not in (Phase.READY, Phase.DRAINING):
            return False
        name = slot.target.key.backend
        if idle := _unused(slot.variant.memory, measured):
            self._stays_off(slot, idle, measured)
            return True
        try:
            place, spec = slot.option.place, slot.variant.spec
            kind = self._hosts[place.host].kind(place.devices)
            memory = await self._ledger.record(self._registry.get(name), spec, measured, kind, fresh=fresh)
        except Exception as error:  # a fault of the backend's
            log.error("the backend %s failed when %s was measured", name, slot.target.name, exc_info=error)
            return False
        slot.count(memory, measured)
        return True

    def _stays_off(self, slot: RunnerSlot, idle: Sequence[int], measured: RequiredMemory) -> None:
        """Says that a runner does not use devices that it was started on. What it holds instead counts for it, but not
        for the next run there, which may use them."""
        label = f"computes elsewhere than on device {', '.join(map(str, idle))}"
        if label not in slot.variant.label:
            log.warning("%s %s; its log may say why: `modelrunner logs %s`", slot.target.name, label, slot.target.name)
            slot.add_label(label)
        slot.count(measured, measured)


def _together(number: int, offers: Mapping[str, Sequence[Variant]]) -> Iterator[HostedVariant]:
    """Yields ways to run something on so many hosts together, of what each of them `offers`: each set of hosts once,
    the next one with other devices, then all of them with other ones."""
    sites = islice(_sites([*offers], number), _MOST_TOGETHER)
    left = [(site, _chosen([offers[name] for name in site], first)) for site, first in sites]
    while left:
        ways, left = left, []
        for site, chosen in ways:
            if (way := next(chosen, None)) is not None:
                left.append((site, chosen))
                lead, *others = way
                memory = replace(lead.memory, others=tuple([other.part for other in others]))
                places = [RunPlace(other.part.devices, name) for other, name in zip(others, site[1:], strict=True)]
                yield HostedVariant(replace(lead, memory=memory), site[0], False, tuple(places))


def _sites(names: Sequence[str], number: int) -> Iterator[tuple[Sequence[str], int]]:
    """Yields sets of so many of these hosts, then the same with another one first; all sets if they are few, else such
    that all hosts are in one soon. With each comes the number of the devices that it tries first: another one for each
    order of a set, as two orders with the same devices are the same room."""
    sets: Iterable[Sequence[str]] = combinations(names, number)
    if comb(len(names), number) > _MOST_TOGETHER:
        firsts = [first for begin in range(number) for first in range(begin, len(names), number)]
        rings = (
            [names[(first + i * step) % len(names)] for i in range(number)]
            for step in range(1, len(names))
            for first in firsts
        )
        found = {frozenset(ring): ring for ring in islice(rings, 4 * _MOST_TOGETHER) if len({*ring}) == number}
        sets = found.values()
    sets = list(sets)[:_MOST_TOGETHER]
    for turn in range(number):
        for i, chosen in enumerate(sets):
            first = (turn + i) % number
            yield [*chosen[first:], *chosen[:first]], i + turn


def _chosen(offers: Sequence[Sequence[Variant]], first: int) -> Iterator[list[Variant]]:
    """Yields the ways to take one of each, first those that are alike, from the number `first` on."""
    sizes = [len(each) for each in offers]
    alike = [tuple([(first + i) % size for size in sizes]) for i in range(max(sizes))]
    for way in chain(alike, (way for way in product(*map(range, sizes)) if way not in alike)):
        yield [each[i] for each, i in zip(offers, way, strict=True)]


def _may_run(host: Host, target: Target) -> bool:
    wanted = target.hosts
    return not wanted or (host.name or HERE) in wanted or any(label in wanted for label in host.labels)


def _unused(planned: RequiredMemory, measured: RequiredMemory) -> list[int]:
    """Returns the devices on which nothing was measured of what was planned; none where no driver tells."""
    pairs = enumerate(zip(planned.vram, measured.vram, strict=False))
    return [device for device, (wanted, held) in pairs if wanted and not held]


def _is_valid(memory: object) -> bool:
    """True for a `RequiredMemory` of one host in whole bytes, none negative: anything else would fail in every plan."""
    if not isinstance(memory, RequiredMemory) or not isinstance(memory.vram, tuple) or memory.others:
        return False
    figures = (memory.ram, memory.shared, *memory.vram)
    return all(type(figure) is int and figure >= 0 for figure in figures) and memory.shared <= memory.ram
