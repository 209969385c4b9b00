"""A model of the store in another quantization, which a tool of its engine makes."""

import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from modelrunner.concurrency.threads import in_thread
from modelrunner.durable import discard
from modelrunner.errors import BadRequest
from modelrunner.progress import ProgressReport
from modelrunner.pull.source import Context, FetchResult, LocalOrigin, PullSpec, make_way
from modelrunner.store import Store
from modelrunner.store.describe import main_type
from modelrunner.store.files import require_space
from modelrunner.types import Bundle, ModelFormat

_TYPE = re.compile(r"[A-Z]{1,5}(?P<bits>[0-9]{1,2})[A-Z0-9_]{0,12}")
_FULL = frozenset({"F32", "F16", "BF16"})
_TARGET = "model.gguf"
# Bits of a weight beyond those in the type's name: scales, and tensors that a mixture (`_M`, `_L`) keeps larger.
_EXTRA_BITS = 1.5
Tool = Callable[[Bundle, Path, str, ProgressReport], Awaitable[None]]
"""Writes the model's weights in a type into a new file. Raises errors of this package."""


@dataclass(frozen=True, slots=True)
class Quantized(LocalOrigin):
    """The model `base` of the store with weights of the `type` (Q4_K_M), which the `tool` makes. The revision of such a
    model is its base's ID. `requantize` accepts a base that is quantized already."""

    store: Store
    tool: Tool
    base: str
    type: str
    requantize: bool = False

    def __str__(self) -> str:
        return f"{self.base} quantized to {self.type}"

    @property
    def made_of(self) -> str:
        return self.base

    async def revision(self, wanted: PullSpec) -> str | None:
        return self.store.get(self.base).id

    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        """Quantizes the model. Raises `BadRequest` for a model that is not GGUF, or that is quantized already without
        `requantize`."""
        base, type, store = self.base, self.type, self.store
        bundle = await in_thread(lambda _: store.bundle(base))
        if bundle.format is not ModelFormat.GGUF:
            raise BadRequest(f"{base} is in {bundle.format}: only a model in GGUF can be quantized", param="model")
        held = main_type(bundle.header.tensors)
        if held not in _FULL and not self.requantize:
            raise BadRequest(
                f"{base} is quantized already ({held}), and another quantization loses more: take one in F16, or give"
                " `--requantize`",
                param="requantize",
            )
        needed = expected_size(bundle, type)
        await context.require_quota({wanted.text: needed})
        await in_thread(lambda _: require_space(context.folder, needed))
        target = await in_thread(lambda _: make_way(context.folder, _TARGET))
        try:
            await self.tool(bundle, target, type, context.report)
        except BaseException:
            await in_thread(lambda _: discard(target))  # no later attempt could continue with a part of it
            raise
        files = await in_thread(lambda _: store.files(bundle.model_id))
        others = {name: blob.digest.hex for name, blob in files.items() if not _is_weights(name)}
        return FetchResult(
            {_TARGET: target}, stored=others, revision=bundle.model_id, version=f"{type} of {bundle.model_id}"
        )


def expected_size(bundle: Bundle, type: str) -> int:
    """Returns the most bytes that the weights will have in a type such as Q4_K_M. Raises `BadRequest`."""
    if (match := _TYPE.fullmatch(type)) is None:
        raise BadRequest(f"{type[:40]!r} is not a type of quantization: write one such as Q4_K_M", param="type")
    weights = sum(math.prod(tensor.shape) for tensor in bundle.header.tensors)
    return int(weights * (int(match["bits"]) + _EXTRA_BITS) / 8)


def _is_weights(name: str) -> bool:
    return re.fullmatch(r"model(-[0-9]{5}-of-[0-9]{5})?\.gguf", name) is not None
