"""Models in Ollama's store: their files, and the defaults that they carry for requests.

The layout: manifests as Docker's, with layers of Ollama's own types
(https://github.com/ollama/ollama/blob/main/server/manifest.go, and model.go for the content of the layers)."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelrunner import durable
from modelrunner.errors import InvalidModel, InvalidReference
from modelrunner.lora import LoraPath
from modelrunner.models.orders import Recipe
from modelrunner.pull.file import Extras
from modelrunner.pull.ollamalayers import CARRIED, ODD, carried
from modelrunner.store import Digest
from modelrunner.store.mediatypes import OLLAMA_TYPE

_LARGEST = 1 << 20  # bytes of a manifest, or of a layer that is read
_MANIFESTS = ("manifests", "manifest-v2")  # the second one of newer releases


@dataclass(frozen=True, slots=True)
class KeptModel:
    """`layers` are its files by their kind."""

    name: str
    layers: Mapping[str, Sequence[Path]]

    @property
    def file(self) -> Path:
        return self.layers["model"][0]

    @property
    def extras(self) -> Extras:
        projector = next(iter(self._of("projector")), None)
        adapters = tuple([LoraPath(path.absolute()) for path in self._of("adapter")])
        return Extras(projector and projector.absolute(), lora=adapters)

    @property
    def size(self) -> int:
        """Returns the bytes of all files. Raises `OSError` for a file that is not there."""
        return sum(path.stat().st_size for kind in ("model", "projector", "adapter") for path in self._of(kind))

    def recipe(self) -> Recipe:
        """Returns the defaults that the model carries, without its template, which is in Go's language: the template in
        its weights takes its place. Parameters of a machine (`num_gpu`) are left out. Raises `InvalidModel`."""
        try:
            return self._recipe()
        except (*ODD, OSError) as error:
            raise InvalidModel(f"what {self.name} carries for requests cannot be read ({error})") from None

    def _recipe(self) -> Recipe:
        found = carried(
            {kind: [durable.read(path.resolve(), _LARGEST).decode() for path in self._of(kind)] for kind in CARRIED}
        )
        return Recipe(
            system=found.system, parameters=found.parameters, messages=found.messages, licences=found.licences
        )

    def _of(self, kind: str) -> Sequence[Path]:
        return self.layers.get(kind, ())


def models_in(root: Path) -> Iterator[KeptModel]:
    """Yields the models of a store; a manifest that is not a model is passed over."""
    manifests: list[Path] = []
    for name in _MANIFESTS:
        with contextlib.suppress(*ODD, OSError):
            manifests += (root / name).glob("*/*/*/*")
    for path in sorted(manifests):
        with contextlib.suppress(*ODD, OSError, InvalidReference):
            layers = _layers(path, root / "blobs")
            host, owner, model, tag = path.parts[-4:]
            if len(layers["model"]) == 1:
                yield KeptModel(f"{host}/{owner}/{model}:{tag}", layers)


def _layers(manifest: Path, blobs: Path) -> dict[str, list[Path]]:
    """Returns the layers of a manifest. Raises `ValueError`, `KeyError` and such for an odd one."""
    content: dict[str, Any] = json.loads(durable.read(manifest.resolve(), _LARGEST))
    found: dict[str, list[Path]] = {}
    for layer in content["layers"]:
        digest = Digest.parse(layer["digest"])
        found.setdefault(layer["mediaType"].removeprefix(OLLAMA_TYPE), []).append(blobs / f"sha256-{digest.hex}")
    return found
