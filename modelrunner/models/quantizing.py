"""Makes a model in another quantization, with the tool of an engine."""

import asyncio
from pathlib import Path

from modelrunner.backend import InstallProgress, Quantizes
from modelrunner.errors import BackendExited, NotImplementedHere
from modelrunner.models.orders import Recipe
from modelrunner.plugins.isolation import interface_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.progress import ProgressReport, WorkProgress
from modelrunner.pull import Puller
from modelrunner.pull.quantized import Quantized
from modelrunner.sandbox import Permissions
from modelrunner.scheduler import Scheduler
from modelrunner.store import Store
from modelrunner.store.details import details_of
from modelrunner.types import Bundle, ProcessOptions, QuantizeSpec


class QuantizeTool:
    """Runs the tool. `logs` takes its output; `permissions` are those of every engine, None if none is confined."""

    def __init__(
        self, registry: BackendRegistry, logs: Path, *, stop_grace: float, permissions: Permissions | None
    ) -> None:
        self._registry, self._logs = registry, logs
        self._stop_grace, self._permissions = stop_grace, permissions

    async def __call__(self, bundle: Bundle, target: Path, type: str, report: ProgressReport) -> None:
        """Quantizes a model's weights. Raises `NotImplementedHere` if the model's backend has no such tool, and as
        `Quantizes.quantize`."""
        backend = await asyncio.to_thread(self._registry.choose, bundle)
        if (tool := interface_of(backend, Quantizes)) is None:
            raise NotImplementedHere(f"{backend.name} quantizes no models: its engine has no tool for that")
        own = Permissions(reads=bundle.paths, writes=(target.parent,))
        permissions = self._permissions and self._permissions | own
        options = ProcessOptions(
            self._logs / f"quantize-{backend.name}.log", stop_grace=self._stop_grace, permissions=permissions
        )

        def told(step: InstallProgress) -> None:
            report(WorkProgress(f"Quantizing {bundle.name}: {step.message}", "quantizing", step.total, step.current))

        report(WorkProgress(f"Quantizing {bundle.name} to {type}", "quantizing"))
        try:
            await tool.quantize(QuantizeSpec(bundle, target, type, options), told)
        except BackendExited as error:
            last = next((line for line in reversed(error.tail.splitlines()) if line.strip()), "no reason given")
            raise error.saying(f"{bundle.name} could not be quantized to {type}: {last[:300]}") from None


class Quantizer:
    def __init__(self, store: Store, puller: Puller, scheduler: Scheduler, tool: QuantizeTool) -> None:
        self._store, self._puller, self._scheduler, self._tool = store, puller, scheduler, tool

    async def quantize(
        self,
        reference: str,
        name: str,
        type: str,
        report: ProgressReport,
        *,
        requantize: bool = False,
        recipe: Recipe = Recipe(),  # noqa: B008  # it is immutable
    ) -> str:
        """Makes the model `name` from the model `reference`, with weights of the `type` (Q4_K_M), the changes of the
        `recipe`, and all other parts, and returns the name. The work ends when no caller waits for it any more; `pulls`
        lists it. `requantize` accepts a model that is quantized already. Raises `ModelNotFound`, `BadRequest`,
        `NotImplementedHere`, `BackendUnavailable` (no engine with the tool is here), `BackendExited` (the tool failed),
        `InsufficientDisk`."""
        base = self._store.get(reference)
        making = recipe.making(await asyncio.to_thread(details_of, self._store, base.id))
        origin = Quantized(self._store, self._tool, base.name, type.upper(), requantize)
        made = await self._puller.pull(origin, report, name=name, making=making)
        self._scheduler.events.emit("pull", model=made.name, reason=f"quantized from {base.name} to {type.upper()}")
        return made.name
