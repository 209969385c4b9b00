"""Measures what makes models faster on this machine: n-gram drafts, and the flags that a backend proposes."""

import asyncio
import logging
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from modelrunner import wire
from modelrunner.backend import Backend, ChecksRuns, Tunes
from modelrunner.concurrency.beat import beat
from modelrunner.config.modelconfig import ModelConfiguration, Speculative
from modelrunner.errors import BadRequest, EngineFailed, EngineProtocolError, ModelRunnerError
from modelrunner.models.configurations import ModelSettings, PostedConfiguration
from modelrunner.models.configurator import SettingParts
from modelrunner.models.runspecs import in_effect
from modelrunner.models.tunings import Tunings
from modelrunner.plugins.isolation import interface_of
from modelrunner.scheduler import Lease, RunnerView, Target
from modelrunner.types import Mode, RunnerKey, RunSpec

_LOOK = 60.0  # seconds between two looks, and for which nobody may have asked before a measuring begins
_YIELDS = 0.1  # seconds after which a measuring at the latest sees that somebody asks
_LONGEST = 900.0  # seconds of one measuring that begins by itself, and of one answer
_ANSWER = 4.0  # seconds that one answer may take, roughly
_TOKENS = (24, 160)  # of an answer, least and most
_LOSS = 0.98
_DRAFTS_GAIN, _FLAGS_GAIN = 1.2, 1.03
"""A change stays if no kind of text has less than `_LOSS` of the speed without it, and one kind has as much more: of
drafts the best one, of flags the middle one."""
_JUDGED, _TAKEN = 2000, 0.2
"""Drafts end once so many tokens were proposed to a runner, and it took a smaller share of them."""
_PATH = "/v1/chat/completions"
_DRAFTS = "n-gram drafts"
_CODE = """def total(items):
    result = 0
    for item in items:
        if item.price is not None:
            result += item.price * item.count
    return result


def average(items):
    result = 0
    for item in items:
        if item.price is not None:
            result += item.price * item.count
    return result / len(items)
"""
_PEOPLE = "\n".join(("Ada, 36, London", "Bob, 25, Paris", "Cleo, 41, Cairo", "Dan, 19, Oslo", "Eve, 52, Rome"))
_STORY = (
    "The old lighthouse stood at the end of the long stone pier. Every evening the keeper climbed the stairs and lit "
    "the lamp. Ships far away saw the light and turned from the rocks. One winter night the storm broke the glass, and "
    "the keeper held the flame in her hands until morning."
)
_KINDS = {
    "code that is edited": f"Return this code, and rename `average` to `mean`:\n```python\n{_CODE}```",
    "a list as JSON": f"Write these people as a JSON list of objects with the keys name, age and city:\n{_PEOPLE}",
    "a text rewritten": f"Repeat this text word for word, and write `she` in place of `the keeper`:\n{_STORY}",
    "a story": "Tell a long story about a dragon who learns to bake bread.",
    "an explanation": "Explain in detail how a car engine works, and why it needs oil.",
}
_PROMPT = "a long prompt"
log = logging.getLogger(__name__)


class _AnswerEnd(msgspec.Struct, frozen=True):
    """What an answer says of its speed: `timings` of llama.cpp, tokens per second, and `usage` of every engine."""

    timings: dict[str, object] | None = None
    usage: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class _Speeds:
    """Tokens per second: of the answer, by the engine's own figure, else its tokens over the time of the whole; of the
    prompt, None for an engine that does not say."""

    answer: float
    prompt: float | None


@dataclass(frozen=True, slots=True)
class _Subject:
    """A model with what it is measured with: `plain` are its settings without what was measured. Clients get the runner
    of the key `used`."""

    name: str
    model_id: str
    backend: Backend
    spec: RunSpec
    plain: ModelConfiguration
    used: RunnerKey


class _Unfit(Exception):
    """The engine does not start with what is tried."""


class Tuner:
    """Measures one model at a time. `drafts` asks runners how many drafts their models took. `idle` is for how many
    seconds nobody may have asked before a measuring begins by itself, and `longest` after how many it is given up. Each
    text is asked `rounds` times each way."""

    def __init__(
        self,
        parts: SettingParts,
        tunings: Tunings,
        drafts: Callable[[Sequence[RunnerView]], Awaitable[Mapping[str, wire.DraftStatus]]],
        *,
        idle: float = _LOOK,
        rounds: int = 3,
        longest: float = _LONGEST,
    ) -> None:
        self._parts = parts
        self._tunings = tunings
        self._drafts = drafts
        self._idle = idle
        self._rounds = rounds
        self._longest = longest
        self._place = tunings.place()
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Each minute, if `speculative` or `tune` of a model is "auto": switches drafts off that do not pay, and
        measures one model while nobody asks anything. Runs until it is cancelled."""
        while True:
            await beat(_LOOK)
            try:
                await self.look()
            except ModelRunnerError as error:
                log.warning("no model was measured: %s", error)
            except Exception:
                log.exception("measuring models failed")

    async def look(self) -> None:
        """Does once what `run` does each minute."""
        settings = self._parts.configurations.settings
        every = (*settings.tables.values(), *(posted.configuration for posted in settings.posted.values()))
        if not any(each.tunes for each in every):
            return
        if (place := self._tunings.place()) != self._place:  # the devices are known a moment after the start
            self._place = place
            self._parts.resolver.forget()
        await self._judge()
        if not self._is_idle():
            return
        for subject in await asyncio.to_thread(self._untuned):
            try:
                fits = await self._parts.scheduler.fits_beside(await asyncio.to_thread(self._target, subject))
            except ModelRunnerError as error:
                log.debug("%s cannot be measured: %s", subject.name, error)  # each minute
                continue
            if fits:
                await self._yielding(subject)
                return

    async def tune(self, reference: str) -> wire.Tuning:
        """Measures the model now, beside whatever else the daemon does, and keeps what is faster. Its runner is
        replaced many times. Raises `BadRequest` for a model that does not chat or has a draft model,
        `ModelNotFound`, and the errors of loading."""
        subject = await asyncio.to_thread(self._subject, reference)
        async with self._lock:
            tuning = await self._measured(subject)
            await asyncio.shield(asyncio.ensure_future(self._keep(subject, tuning)))  # goes on if the client leaves
            return tuning

    def _is_idle(self) -> bool:
        """Returns True if nobody asks, and nobody has asked in the last minute."""
        idle = self._parts.scheduler.idle_for()
        return idle is not None and idle >= self._idle and not self._lock.locked()

    def _untuned(self) -> list[_Subject]:
        """Returns the models that are to be measured and were not."""
        found = []
        for model in self._parts.store.list():
            if self._parts.configurations.settings.of(model.id, Mode.COMPLETION).tunes:
                try:
                    subject = self._subject(model.id)
                except ModelRunnerError as error:
                    log.debug("%s cannot be measured: %s", model.name, error)  # each minute
                    continue
                if self._tunings.of(subject.backend, subject.spec) is None:
                    found.append(subject)
        return found

    def _subject(self, reference: str) -> _Subject:
        parts = self._parts
        bundle, settings = parts.store.bundle(reference), parts.configurations.settings
        if parts.resolver.mode_of(bundle) is not Mode.COMPLETION:
            raise BadRequest(f"{bundle.name} does not chat: there is nothing to measure", param="model")
        backend = parts.resolver.configured_backend(bundle, Mode.COMPLETION, settings)
        wanted = in_effect(backend, settings, bundle.model_id, Mode.COMPLETION)
        if not self._tunings.holds_for(wanted):
            raise BadRequest(
                f"{bundle.name} may run on other hosts, and what is faster here may be slower there: "
                f"`modelrunner configure {bundle.name} --hosts here` keeps it on this machine",
                param="model",
            )
        if wanted.drafting is not None and not wanted.drafting.ngram:
            drafter = "heads that draft" if wanted.drafting.mtp else "a draft model"
            raise BadRequest(
                f"{bundle.name} has {drafter}: `modelrunner configure {bundle.name} --draft-model default` takes that "
                "back",
                param="model",
            )
        plain = msgspec.structs.replace(wanted, speculative=None, tune=None)
        spec = self._target_of(bundle.model_id, plain).spec
        used = parts.validator.target(bundle, Mode.COMPLETION, settings).key
        return _Subject(bundle.name, bundle.model_id, backend, spec, plain, used)

    def _target(self, subject: _Subject, drafts: bool = False, flags: Sequence[str] = ()) -> Target:
        own = (*flags, *(subject.plain.runtime_flags or ()))
        speculative = Speculative(ngram=True) if drafts else None
        changed = msgspec.structs.replace(subject.plain, speculative=speculative, runtime_flags=own or None)
        return self._target_of(subject.model_id, changed)

    def _target_of(self, model_id: str, configuration: ModelConfiguration) -> Target:
        """Returns the target of the model with this configuration in place of its own."""
        wanted = ModelSettings({model_id: PostedConfiguration(0, configuration)})
        return self._parts.validator.target(self._parts.store.bundle(model_id), Mode.COMPLETION, wanted)

    async def _yielding(self, subject: _Subject) -> None:
        """Measures until it is done, until somebody asks, or until it has taken too long: it is not begun again then.
        After an error it is once the daemon has started again, since some pass."""
        async with self._lock:
            work, asked = asyncio.ensure_future(self._measured(subject)), False
            until = time.monotonic() + self._longest
            try:
                while not work.done() and not asked and time.monotonic() < until:
                    await asyncio.wait((work,), timeout=_YIELDS)
                    asked = self._parts.scheduler.awaited()
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            if not work.cancelled():
                if (error := work.exception()) is not None:
                    await self._keep(subject, _nothing(str(error)), lasting=False)
                else:
                    await self._keep(subject, work.result())
            elif asked:
                self._tell(subject, "ended before its end: somebody asked")
            else:
                limit = f"it took longer than {self._longest:.0f} s"
                await self._keep(subject, _nothing(f"{limit}: `modelrunner bench {subject.name} --tune` has no limit"))

    async def _measured(self, subject: _Subject) -> wire.Tuning:
        self._tell(subject, "the measuring begins")
        drafts, flags = False, list[str]()
        trials = []
        for what, with_drafts, more in await asyncio.to_thread(self._candidates, subject):
            before = await asyncio.to_thread(self._target, subject, drafts, flags)
            after = await asyncio.to_thread(self._target, subject, drafts or with_drafts, [*flags, *more])
            try:
                kinds = await self._compared(subject, before, after, with_prompt=bool(more))
            except _Unfit as fault:
                trials.append(wire.TuningTrial(what, kept=False, texts=[], fault=str(fault)))
                continue
            kept = _pays([kind.ratio for kind in kinds], drafts=with_drafts)
            trials.append(wire.TuningTrial(what, kept, kinds))
            if kept:
                drafts, flags = drafts or with_drafts, [*flags, *more]
        kept_ones = [trial.what for trial in trials if trial.kept]
        reason = f"faster with {', '.join(kept_ones)}" if kept_ones else "nothing that was tried is faster"
        return wire.Tuning(drafts=drafts, flags=flags, trials=trials, reason=reason)

    def _candidates(self, subject: _Subject) -> list[tuple[str, bool, tuple[str, ...]]]:
        """Returns what is tried: its name, whether it is drafts, and its flags."""
        found: list[tuple[str, bool, tuple[str, ...]]] = []
        if interface_of(subject.backend, ChecksRuns) is not None:
            try:
                self._target(subject, drafts=True)
            except BadRequest:
                pass
            else:
                found.append((_DRAFTS, True, ()))
        if (tunes := interface_of(subject.backend, Tunes)) is not None:
            found += [(" ".join(flags), False, tuple(flags)) for flags in tunes.tunings(subject.spec)]
        return found

    async def _compared(
        self, subject: _Subject, before: Target, after: Target, *, with_prompt: bool
    ) -> list[wire.TunedText]:
        """Measures both in turn. The load is not measured. The speed of a prompt only counts if the engine says it each
        time. Raises `_Unfit` if the engine does not start with `after`."""
        plain, changed = ({name: list[float]() for name in (*_KINDS, _PROMPT)} for _ in range(2))
        for number in range(self._rounds):
            for way, target, speeds in ((False, before, plain), (True, after, changed)):
                async with self._loaded(subject, target, is_tried=way) as lease:
                    least, most = _TOKENS
                    first = await _asked(lease, "Say hello.", least)
                    tokens = int(min(max(first.answer * _ANSWER, least), most))
                    for kind, prompt in _KINDS.items():
                        speeds[kind].append((await _asked(lease, prompt, tokens)).answer)
                    if with_prompt:
                        words = f"{number} {way} {_STORY}" + f" {_STORY}" * 8  # no cache has it
                        if (speed := (await _asked(lease, words, 2)).prompt) is not None:
                            speeds[_PROMPT].append(speed)
        told = [name for name in plain if len(plain[name]) == len(changed[name]) == self._rounds]
        return [_text(name, plain[name], changed[name]) for name in told]

    @asynccontextmanager
    async def _loaded(self, subject: _Subject, target: Target, *, is_tried: bool) -> AsyncIterator[Lease]:
        """Yields a runner of exactly this target, which ends after the block unless it was there before. After an error
        the one that clients get stays: who asks for the model next may use it. An engine that does not start is
        `_Unfit` if it `is_tried`."""
        scheduler = self._parts.scheduler
        was_there = scheduler.has(target)
        try:
            try:
                lease = await scheduler.restart(target, batch=True, owner="tune")
            except EngineFailed as error:
                if is_tried:
                    raise _Unfit(str(error)) from error
                raise
            with lease:
                yield lease
        except BaseException:
            if not was_there and target.key != subject.used:
                scheduler.discard(target)
            raise
        if not was_there:
            await scheduler.end(target)

    async def _judge(self) -> None:
        """Takes back the drafts of models that did not take them."""
        parts = self._parts
        drafting = [view for view in parts.scheduler.runners() if view.mode is Mode.COMPLETION and view.pid is not None]
        settings = parts.configurations.settings
        drafting = [v for v in drafting if settings.of(v.model_id, v.mode).speculative == "auto"]
        counts = await self._drafts(drafting) if drafting else {}
        for view in drafting:
            if (count := counts.get(view.id)) is None or count.proposed < _JUDGED:
                continue
            share = count.accepted / count.proposed
            try:
                subject = await asyncio.to_thread(self._subject, view.model_id)
            except ModelRunnerError:  # it was removed, or has other settings now: its runner goes
                continue
            known = await asyncio.to_thread(self._tunings.of, subject.backend, subject.spec)
            if share < _TAKEN and known is not None and known.drafts:
                reason = f"no drafts: {share:.0%} of {count.proposed} were taken"
                await self._keep(subject, msgspec.structs.replace(known, drafts=False, reason=reason))
                parts.scheduler.retire(await asyncio.to_thread(self._target, subject, False, known.flags))

    async def _keep(self, subject: _Subject, tuning: wire.Tuning, *, lasting: bool = True) -> None:
        await asyncio.to_thread(self._tunings.keep, subject.backend, subject.spec, tuning, lasting=lasting)
        self._parts.resolver.forget()
        self._tell(subject, tuning.reason)

    def _tell(self, subject: _Subject, reason: str) -> None:
        self._parts.scheduler.events.emit("tune", model=subject.name, reason=reason)


async def _asked(lease: Lease, prompt: str, tokens: int) -> _Speeds:
    """Asks the engine directly. Raises `EngineFailed` for an answer without figures."""
    runner = lease.runner
    body = {
        "model": runner.names[0] if runner.names else runner.spec.bundle.name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,  # so that the engine notices when nobody waits any more
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    try:
        status, answer = await runner.upstream.fetch("POST", _PATH, msgspec.json.encode(body), timeout=_LONGEST)
    except (OSError, EngineProtocolError) as error:
        raise EngineFailed(f"{runner.spec.bundle.name} gave no answer to measure: {error}") from error
    elapsed = time.perf_counter() - began
    found = _figures(answer) if status == 200 else _AnswerEnd()
    timings, counted = found.timings or {}, (found.usage or {}).get("completion_tokens")
    whole = counted / elapsed if isinstance(counted, int) else None
    if (speed := _positive(timings.get("predicted_per_second")) or _positive(whole)) is None:
        raise EngineFailed(f"{runner.spec.bundle.name} gave no answer to measure (status {status})")
    return _Speeds(speed, _positive(timings.get("prompt_per_second")))


def _nothing(why: str) -> wire.Tuning:
    return wire.Tuning(drafts=False, flags=[], trials=[], reason=f"nothing was measured: {why}")


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _figures(stream: bytes) -> _AnswerEnd:
    """Returns the last figures of a stream."""
    timings = usage = None
    for line in stream.splitlines():
        if line.startswith(b"data: {") and (b'"timings"' in line or b'"usage"' in line):
            try:
                found = msgspec.json.decode(line.removeprefix(b"data: "), type=_AnswerEnd)
            except msgspec.MsgspecError:
                continue
            timings, usage = found.timings or timings, found.usage or usage
    return _AnswerEnd(timings, usage)


def _text(name: str, plain: list[float], changed: list[float]) -> wire.TunedText:
    ratio = statistics.median(after / before for before, after in zip(plain, changed, strict=True))
    before, after = (round(statistics.median(speeds), 2) for speeds in (plain, changed))
    return wire.TunedText(name, before, after, round(ratio, 3))


def _pays(ratios: list[float], *, drafts: bool) -> bool:
    if min(ratios) < _LOSS:
        return False
    return max(ratios) >= _DRAFTS_GAIN if drafts else statistics.median(ratios) >= _FLAGS_GAIN
