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


def model(found: StoredModel, abilities: Abilities, aliases: Sequence[str] = ()) -> wire.Model:
    return wire.Model(
        found.id,
        found.tags,
        found.created,
        msgspec.Raw(found.config_data),  # not decoded: there may be thousands of models
        found.damage,
        list(abilities.capabilities),
        abilities.window,
        list(abilities.adapters),
        aliases=list(aliases),
        check=abilities.check,
    )


def details(name: str, found: StoredModel, told: ModelDetails, template_problem: str) -> wire.ModelShown:
    shown = _shown(name, found.id, found.tags, msgspec.Raw(found.config_data), told)
    return msgspec.structs.replace(shown, template_problem=template_problem)


def remote_model(found: RemoteModel) -> wire.Model:
    """Returns a model at its source, with the ID "" if the source gives none."""
    order = list(in_order(found.capabilities))
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
