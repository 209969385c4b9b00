"""Translates models, pulls and disk use to the structs of wire/models.py."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from modelrunner import wire
from modelrunner.defaults import NO_DEFAULTS, ModelDefaults
from modelrunner.modelfile import Modelfile, render
from modelrunner.models.abilities import Abilities
from modelrunner.models.disk import DiskReport
from modelrunner.models.publishing import RemoteModel
from modelrunner.progress import FileProgress, RunningPull, WorkProgress
from modelrunner.store import RemoveResult, StoredModel
from modelrunner.store.details import ModelDetails
from modelrunner.types import in_order


def model(stored: StoredModel, abilities: Abilities, aliases: Sequence[str] = ()) -> wire.Model:
    return wire.Model(
        stored.id,
        stored.tags,
        stored.created,
        msgspec.Raw(stored.config_data),  # not decoded: there may be thousands of models
        stored.damage,
        list(abilities.capabilities),
        abilities.window,
        list(abilities.adapters),
        aliases=list(aliases),
        check=abilities.check,
    )


def details(name: str, stored: StoredModel, parts: ModelDetails, template_problem: str) -> wire.ModelShown:
    shown = _shown(name, stored.id, stored.tags, msgspec.Raw(stored.config_data), parts)
    return msgspec.structs.replace(shown, template_problem=template_problem)


def remote_model(remote: RemoteModel) -> wire.Model:
    """Returns a model at its source, with the ID "" if the source gives none."""
    order = list(in_order(remote.capabilities))
    return wire.Model(_id(remote), [remote.name], 0, remote.config, "", order, remote.config.get("context_size"))


def remote_details(remote: RemoteModel) -> wire.ModelShown:
    shown = _shown(remote.name, _id(remote), [remote.name], remote.config, remote.details)
    return msgspec.structs.replace(shown, version=remote.version, files=dict(remote.files))


def _id(remote: RemoteModel) -> str:
    return remote.version if remote.version.startswith("sha256:") else ""


def _shown(name: str, id: str, tags: list[str], config: Any, parts: ModelDetails) -> wire.ModelShown:
    carried = parts.defaults or NO_DEFAULTS
    return wire.ModelShown(
        id,
        tags,
        config,
        parts.template,
        parts.template_digest,
        list(parts.licences),
        carried.system,
        [wire.CarriedMessage(message.role, message.content) for message in carried.messages],
        {**carried.parameters, **carried.template_arguments},
        carried.context_size,
        modelfile(name, carried),
    )


def modelfile(name: str, carried: ModelDefaults) -> str:
    """Returns a Modelfile that makes the model `name` with these defaults."""
    context = {"num_ctx": carried.context_size} if carried.context_size else {}
    messages = tuple((message.role, message.content) for message in carried.messages)
    parameters = {**carried.parameters, **carried.template_arguments, **context}
    return render(Modelfile(name, carried.system, parameters=parameters, messages=messages))


def removed(done: RemoveResult) -> list[wire.Removal]:
    untagged = [wire.Removal(untagged=name) for name in done.names]
    return [*untagged, wire.Removal(deleted=done.deleted)] if done.deleted else untagged


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


def disk_usage(report: DiskReport) -> wire.DiskUsage:
    models = [
        wire.ModelUsage(
            each.model.id,
            each.model.tags,
            each.size,
            each.shared,
            each.reclaimable,
            int(report.last_used[each.model.id]),
            str(each.folder),
        )
        for each in report.store.models
    ]
    backends = [wire.BackendUsage(each.name, each.version, each.engine, each.state) for each in report.engines]
    engines = sum(each.engine for each in report.engines)
    folders = [wire.FolderUsage(str(f.path), f.total, f.partial, f.free) for f in report.store.folders]
    folders += [wire.FolderUsage(str(folder.path), absent=folder.message) for folder in report.absent]
    return wire.DiskUsage(models, backends, report.store.total, engines, report.store.partial, folders)
