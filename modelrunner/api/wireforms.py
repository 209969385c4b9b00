"""Translates runners, events, configurations and requests to the structs of wire: times become RFC 3339 in UTC, enums
text."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from pydantic import BaseModel

from modelrunner import wire
from modelrunner.gateway.request.observers import RequestRecord
from modelrunner.models.explain import FitReport
from modelrunner.models.reload import SettingChange
from modelrunner.sandbox import Sandbox
from modelrunner.scheduler import EventRecord, Explanation, MemoryUse, RunnerView, UnloadResult
from modelrunner.scheduler.devices import Device
from modelrunner.telemetry.recordings import Recorded
from modelrunner.types import RequiredMemory

_LONGEST_CHANGE = 200  # characters of one value


def runner(view: RunnerView, drafts: wire.DraftStatus | None = None) -> wire.RunnerStatus:
    measured = view.memory.measured
    return wire.RunnerStatus(
        id=view.id,
        backend_name=view.backend_name,
        model_name=view.model_name,
        model_id=view.model_id,
        mode=view.mode,
        state=view.state,
        stage=view.stage,
        pid=view.pid,
        endpoint=str(view.endpoint),
        context_size=view.context_size,
        parallel=view.parallel,
        memory=wire.RunnerMemory(memory(view.memory.estimated), memory(measured) if measured else None),
        leases=view.leases,
        queued=view.queued,
        started_at=moment(view.started_at),
        last_used=None if view.last_used is None else moment(view.last_used),
        expires_at=None if view.expires_at is None else moment(view.expires_at),
        keep_alive=str(view.keep_alive),
        pinned=view.pinned,
        in_use=view.leases > 0,
        loading=view.state == "starting",
        variant=view.variant,
        host=view.host,
        sandbox=_sandbox(view.sandbox) if view.sandbox else None,
        models=dict(view.models),
        drafts=drafts,
    )


def _sandbox(sandbox: Sandbox) -> wire.SandboxStatus:
    return wire.SandboxStatus(sandbox.state, list(sandbox.layers), list(sandbox.gaps))


def unloaded(done: UnloadResult) -> wire.UnloadResponse:
    kept = [wire.RetainedRunner(each.id, each.reason) for each in done.kept]
    return wire.UnloadResponse(len(done.models), list(done.models), kept)


def event(record: EventRecord) -> wire.Event:
    return wire.Event(
        record.id,
        record.event,
        moment(record.time),
        record.runner,
        record.model,
        record.reason,
        dict(record.details),
    )


def why(explanation: Explanation) -> wire.WhyResponse:
    figures = explanation.figures
    return wire.WhyResponse(
        explanation.model,
        explanation.state.value,
        explanation.position,
        explanation.waiting_for,
        memory(figures.needed) if figures.needed else None,
        memory(figures.free),
        memory(figures.budget),
        explanation.victims,
        None if explanation.expected_seconds is None else round(explanation.expected_seconds, 1),
        explanation.reason,
        [event(record) for record in explanation.events],
    )


def fit(report: FitReport) -> wire.Fit:
    forecast, figures = report.forecast, report.forecast.figures
    return wire.Fit(
        forecast.fits,
        memory(figures.needed) if figures.needed else None,
        memory(figures.free),
        memory(figures.budget),
        forecast.would_evict,
        forecast.reason,
        wire.Disk(report.disk_needed, report.disk_free),
    )


def change(changed: SettingChange) -> wire.Change:
    if not changed.of_model:
        return wire.Change(changed.name, _json(changed.before), _json(changed.after), changed.effect)
    return wire.Change(f'models."{changed.name}"', _fields(changed.before), _fields(changed.after), changed.effect)


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_cut(_json(value))}" for name, value in fields.items())


def _cut(text: str) -> str:
    """Shortens long values such as chat templates."""
    return text if len(text) <= _LONGEST_CHANGE else f"{text[:_LONGEST_CHANGE]}..."


def _json(value: Any) -> str:
    # At its top level, msgspec would write a dataclass such as KeepAlive as an object.
    plain = value if value is None or isinstance(value, bool | int | float | str | list | tuple | dict) else str(value)
    return msgspec.json.encode(plain, enc_hook=_plain).decode()


def _plain(value: Any) -> Any:
    return (
        value.model_dump(mode="json", by_alias=True, exclude_unset=True) if isinstance(value, BaseModel) else str(value)
    )


def memory(figures: RequiredMemory) -> wire.Memory:
    return wire.Memory(figures.ram, list(figures.vram))


def main_memory(use: MemoryUse) -> dict[str, int]:
    return {"budget": use.budget.ram, "used": use.used.ram, "free": use.free.ram}


def devices(seen: Sequence[Device], memory: MemoryUse) -> list[wire.DeviceStatus]:
    budgets = memory.budget.vram
    return [
        wire.DeviceStatus(
            name=device.name,
            address=device.address or device.uuid,
            total=device.total,
            free=device.free,
            others=device.others,
            budget=budgets[number] if number < len(budgets) else 0,
            engines=dict(device.names or {}),
            utilization=device.utilization,
            temperature=device.temperature,
            fault=device.fault,
            hides_processes=device.hides_processes,
        )
        for number, device in enumerate(seen)
    ]


def moment(seconds: float) -> str:
    """Returns a time in Unix seconds as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def request(record: RequestRecord) -> wire.RequestStatus:
    answer = record.tokens.answer
    writing = record.duration - (record.first_byte or 0.0)
    speed = round((answer - 1) / writing, 1) if answer > 1 and record.first_byte is not None and writing > 0 else None
    fields = record.flat()
    del fields["tokens"], fields["trace"]
    for name in ("queued", "loading", "duration", "first_byte"):
        fields[name] = fields[name] and round(fields[name], 4)
    return wire.RequestStatus(
        **{**fields, "time": moment(record.time)},
        prompt_tokens=record.tokens.prompt,
        completion_tokens=answer,
        cached_tokens=record.tokens.cached,
        tokens_per_second=speed,
    )


def recorded(recording: Recorded) -> wire.RecordedRequest:
    return wire.RecordedRequest(request(recording.record), recording.path, recording.request, recording.answer)
