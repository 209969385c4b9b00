"""Makes a model from another one or from files that were sent before, perhaps in another quantization."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modelrunner.backend import InstallProgress, Quantizes
from modelrunner.errors import BackendExited, BadRequest, Forbidden, NotImplementedHere
from modelrunner.models.library import Library
from modelrunner.models.orders import PullOrder, Recipe
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
        pulled = await self._puller.pull(origin, report, name=name, making=making)
        self._scheduler.events.emit("pull", model=pulled.name, reason=f"quantized from {base.name} to {type.upper()}")
        return pulled.name


@dataclass(frozen=True, slots=True)
class MakeOrder:
    """The order of the model `name`, which is made from the model `base` or from `files`. `files` and the LoRA adapters
    `adapters` were sent before: they map names to digests. `quantize` is the type of the new weights (Q4_K_M), "" for
    the weights of `base`."""

    name: str
    base: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    quantize: str = ""
    recipe: Recipe = field(default_factory=Recipe)


class Maker:
    def __init__(self, library: Library, quantizer: Quantizer) -> None:
        self._library = library
        self._quantizer = quantizer

    def pull_order(self, wanted: MakeOrder) -> PullOrder:
        """Returns the order of the same model without its quantization. Raises `BadRequest`, `NotImplementedHere` for
        several steps in one order, and `Forbidden` for a file of this machine."""
        together = {
            "adapters": wanted.adapters and (wanted.files or wanted.quantize),
            "quantize": wanted.quantize and wanted.files,
        }
        if too_much := [name for name, value in together.items() if value]:
            raise NotImplementedHere(
                f"{', '.join(too_much)} cannot be followed in this request: make a model of the files first, then "
                "one of that with `from` and `adapters`, then one of that with `from` and `quantize`",
                param=too_much[0],
            )
        if wanted.files and wanted.base:
            raise BadRequest("a model is made of files or of another model: leave `from` or `files` out", param="files")
        if wanted.files:
            return PullOrder("", wanted.name, recipe=wanted.recipe, files=wanted.files)
        if not wanted.base:
            raise BadRequest("from names no model", param="from")
        order = PullOrder(wanted.base, wanted.name, recipe=wanted.recipe, adapters=wanted.adapters)
        if order.is_local:
            raise Forbidden("a file of this machine is packaged with `modelrunner package`", param="from")
        return order

    async def make(self, wanted: MakeOrder, report: ProgressReport) -> str:
        """Makes the model and returns its name. Raises as `pull_order`, `Library.make` and `Quantizer.quantize`."""
        order = self.pull_order(wanted)
        if wanted.quantize:
            return await self._quantizer.quantize(
                wanted.base, wanted.name, wanted.quantize, report, recipe=wanted.recipe
            )
        return await self._library.make(order, report)
