"""Makes a model from another one or from files that were sent before, perhaps in another quantization."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelrunner.errors import BadRequest, Forbidden, NotImplementedHere
from modelrunner.models.library import Library
from modelrunner.models.orders import PullOrder, Recipe
from modelrunner.models.quantizing import Quantizer
from modelrunner.progress import ProgressReport


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
        if too_much := [name for name, given in together.items() if given]:
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
