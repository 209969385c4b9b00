"""Translates pulls to the structs of wire/models.py."""

from typing import Literal

from modelrunner import wire
from modelrunner.defaults import ModelDefaults
from modelrunner.modelfile import Modelfile, render
from modelrunner.progress import FileProgress, RunningPull, WorkProgress


def modelfile(name: str, carried: ModelDefaults) -> str:
    """Returns a Modelfile that makes the model `name` with these defaults."""
    context = {"num_ctx": carried.context_size} if carried.context_size else {}
    messages = tuple((message.role, message.content) for message in carried.messages)
    parameters = {**carried.parameters, **carried.template_arguments, **context}
    return render(Modelfile(name, carried.system, parameters=parameters, messages=messages))


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
