"""Translates the daemon's values to the structs of wire: times become RFC 3339 in UTC, enums text."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from modelrunner import wire
from modelrunner.batches.batch import Batch, BatchState, LineError
from modelrunner.batches.filestore import UploadedFile
from modelrunner.defaults import NO_DEFAULTS, ModelDefaults
from modelrunner.modelfile import Modelfile, render
from modelrunner.models.abilities import Abilities
from modelrunner.models.configurator import ShownConfiguration
from modelrunner.models.disk import DiskReport
from modelrunner.models.explain import FitReport
from modelrunner.models.pruning import PrunedThing
from modelrunner.models.reload import SettingChange
from modelrunner.models.remote import RemoteModel
from modelrunner.models.residency import ModelResidency
from modelrunner.progress import FileProgress, RunningPull, WorkProgress
from modelrunner.sandbox import Sandbox
from modelrunner.scheduler import EventRecord, Explanation, MemoryUse, RunnerView, UnloadResult
from modelrunner.store import RemoveResult, StoredModel
from modelrunner.store.details import ModelDetails
from modelrunner.types import CAPABILITIES, RequiredMemory

_LONGEST_CHANGE = 200  # characters of one value


def model(found: StoredModel, abilities: Abilities) -> wire.Model:
    return wire.Model(
        found.id,
        found.tags,
        found.created,
        msgspec.Raw(found.config_data),  # not decoded: there may be thousands of models
        found.damage,
        list(abilities.capabilities),
        abilities.window,
        [wire.AppliedAdapter(adapter.name, adapter.scale, adapter.size) for adapter in abilities.adapters],
    )


def details(name: str, found: StoredModel, told: ModelDetails) -> wire.ModelShown:
    return _shown(name, found.id, found.tags, msgspec.Raw(found.config_data), told)


def remote_model(found: RemoteModel) -> wire.Model:
    """Returns a model at its source, with the ID "" if the source gives none."""
    order = [capability for capability in CAPABILITIES if capability in found.capabilities]
    return wire.Model(_id(found), [found.name], 0, found.config, "", order, found.config.get("context_size"))


def remote_details(found: RemoteModel) -> wire.ModelShown:
    shown = _shown(found.name, _id(found), [found.name], found.config, found.details)
    return msgspec.structs.replace(shown, version=found.version, files=dict(found.files))


def _id(found: RemoteModel) -> str:
    return found.version if found.version.startswith("sha256:") else ""


def _shown(name: str, id: str, tags: list[str], config: Any, told: ModelDetails) -> wire.ModelShown:
    carried = told.defaults or NO_DEFAULTS
    return wire.ModelShown(
        id,
        tags,
        config,
        told.template,
        told.template_digest,
        list(told.licences),
        carried.system,
        [wire.CarriedMessage(message.role, message.content) for message in carried.messages],
        dict(carried.parameters),
        carried.context_size,
        modelfile(name, carried),
    )


def modelfile(name: str, carried: ModelDefaults) -> str:
    """Returns a Modelfile that makes the model `name` with these defaults."""
    context = {"num_ctx": carried.context_size} if carried.context_size else {}
    messages = tuple((message.role, message.content) for message in carried.messages)
    return render(Modelfile(name, carried.system, parameters={**carried.parameters, **context}, messages=messages))


def openai_model(name: str, found: StoredModel, abilities: Abilities) -> wire.OpenAIModel:
    return wire.OpenAIModel(
        id=name,
        created=found.created,
        architecture=found.config.get("architecture"),
        context_window=abilities.window or found.config.get("context_size"),
        capabilities=list(abilities.capabilities),
        backend=abilities.backend,
    )


def removed(done: RemoveResult) -> list[wire.Removal]:
    untagged = [wire.Removal(untagged=name) for name in done.names]
    return [*untagged, wire.Removal(deleted=done.deleted)] if done.deleted else untagged


def file(found: UploadedFile) -> wire.FileStatus:
    return wire.FileStatus(found.id, found.bytes, int(found.created), found.filename, found.purpose)


def batch(found: Batch) -> wire.BatchStatus:
    """Returns the batch object of OpenAI's API."""

    def at(moment: float | None, *states: BatchState) -> int | None:
        return int(moment) if moment is not None and (not states or found.status in states) else None

    return wire.BatchStatus(
        id=found.id,
        endpoint=found.endpoint,
        errors={"object": "list", "data": list(map(_line_error, found.errors))} if found.errors else None,
        input_file_id=found.input_file,
        completion_window=found.window,
        status=found.status.value,
        output_file_id=found.output_file,
        error_file_id=found.error_file,
        created_at=int(found.created),
        in_progress_at=at(found.created) if not found.errors else None,
        expires_at=int(found.expires),
        finalizing_at=at(found.finalizing),
        completed_at=at(found.ended, BatchState.COMPLETED),
        failed_at=at(found.ended, BatchState.FAILED),
        expired_at=at(found.ended, BatchState.EXPIRED),
        cancelling_at=at(found.cancelling),
        cancelled_at=at(found.ended, BatchState.CANCELLED),
        request_counts={"total": found.total, "completed": found.completed, "failed": found.failed},
        metadata=found.metadata or None,
    )


def _line_error(found: LineError) -> dict[str, Any]:
    return {"code": found.code, "message": found.message, "line": found.line, "param": found.param}


def progress(step: WorkProgress) -> wire.Progress:
    file = step.file
    layer = wire.Layer(file.id, file.size, file.current, file.rate, _remaining(file)) if file else None
    kind: Literal["progress", "warning"] = "warning" if step.warning else "progress"
    return wire.Progress(
        kind,
        step.message,
        step.total,
        step.current,
        layer,
        phase=step.phase,
        rate=step.rate,
        remaining=_remaining(step),
    )


def _remaining(part: WorkProgress | FileProgress) -> float | None:
    """Returns the seconds that are left at the present rate."""
    total = part.size if isinstance(part, FileProgress) else part.total
    return round((total - part.current) / part.rate, 1) if part.rate > 0 and total > part.current else None


def pull(running: RunningPull) -> wire.PullStatus:
    return wire.PullStatus(running.name, running.source, int(running.started), progress(running.progress))


def runner(view: RunnerView) -> wire.RunnerStatus:
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
        sandbox=_sandbox(view.sandbox) if view.sandbox else None,
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


def why(found: Explanation) -> wire.WhyResponse:
    figures = found.figures
    return wire.WhyResponse(
        found.model,
        found.state.value,
        found.position,
        found.waiting_for,
        memory(figures.needed) if figures.needed else None,
        memory(figures.free),
        memory(figures.budget),
        found.victims,
        None if found.expected_seconds is None else round(found.expected_seconds, 1),
        found.reason,
        [event(record) for record in found.events],
    )


def fit(report: FitReport) -> wire.Fit:
    found, figures = report.forecast, report.forecast.figures
    return wire.Fit(
        found.fits,
        memory(figures.needed) if figures.needed else None,
        memory(figures.free),
        memory(figures.budget),
        found.would_evict,
        found.reason,
        wire.Disk(report.disk_needed, report.disk_free),
    )


def disk_usage(found: DiskReport) -> wire.DiskUsage:
    models = [
        wire.ModelUsage(
            each.model.id,
            each.model.tags,
            each.size,
            each.shared,
            each.reclaimable,
            int(found.last_used[each.model.id]),
            str(each.folder),
        )
        for each in found.store.models
    ]
    backends = [wire.BackendUsage(each.name, each.version, each.engine, each.state) for each in found.engines]
    engines = sum(each.engine for each in found.engines)
    folders = [wire.FolderUsage(str(f.path), f.total, f.partial, f.free) for f in found.store.folders]
    folders += [wire.FolderUsage(str(folder.path), absent=folder.message) for folder in found.absent]
    return wire.DiskUsage(models, backends, found.store.total, engines, found.store.partial, folders)


def pruned(things: Sequence[PrunedThing], *, dry_run: bool) -> wire.PruneResponse:
    items = [wire.PrunedItem(thing.kind, thing.name, thing.size) for thing in things]
    return wire.PruneResponse(sum(thing.size for thing in things), items, dry_run)


def model_state(residency: ModelResidency, what: str) -> wire.ModelState:
    name = residency.model.name
    return wire.ModelState(name, residency.state or "stopped", f"{name} {what}")


def configuration(shown: ShownConfiguration) -> wire.Configuration:
    effect = None
    if shown.effect:
        own = {
            "backend": shown.effect.backend,
            "context-size": shown.effect.context_size,
            "parallel": shown.effect.parallel,
        }
        effect = shown.effect.configuration.as_dict() | own
    posted = shown.posted
    return wire.Configuration(
        model=shown.model.name,
        mode=shown.mode,
        revision=posted.revision,
        config=posted.configuration.as_dict(),
        file=shown.file.as_dict(),
        effective=effect,
        problem=shown.problem,
    )


def change(found: SettingChange) -> wire.Change:
    if not found.of_model:
        return wire.Change(found.name, _json(found.before), _json(found.after), found.effect)
    return wire.Change(f'models."{found.name}"', _fields(found.before), _fields(found.after), found.effect)


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_cut(_json(value))}" for name, value in fields.items())


def _cut(text: str) -> str:
    """Shortens long values such as chat templates."""
    return text if len(text) <= _LONGEST_CHANGE else f"{text[:_LONGEST_CHANGE]}..."


def _json(value: Any) -> str:
    # At its top level, msgspec would write a dataclass such as KeepAlive as an object.
    plain = value if value is None or isinstance(value, bool | int | float | str | list | tuple | dict) else str(value)
    return msgspec.json.encode(plain, enc_hook=str).decode()


def memory(figures: RequiredMemory) -> wire.Memory:
    return wire.Memory(figures.ram, list(figures.vram))


def main_memory(found: MemoryUse) -> dict[str, int]:
    return {"budget": found.budget.ram, "used": found.used.ram, "free": found.free.ram}


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
