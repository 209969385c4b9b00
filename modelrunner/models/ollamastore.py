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
from modelrunner.defaults import SamplingOptions
from modelrunner.errors import InvalidModel, InvalidReference
from modelrunner.models.recipes import Recipe
from modelrunner.store import Digest

_LARGEST = 1 << 20  # bytes of a manifest, or of a layer that is read
_MANIFESTS = ("manifests", "manifest-v2")  # the second one of newer releases
_TYPE = "application/vnd.ollama.image."
_CARRIED = ("system", "params", "messages", "license")
_ODD = (ValueError, KeyError, TypeError, AttributeError, RuntimeError)  # JSON of another shape, a loop of links


@dataclass(frozen=True, slots=True)
class KeptModel:
    """`layers` are its files by their kind."""

    name: str
    layers: Mapping[str, Sequence[Path]]

    @property
    def file(self) -> Path:
        return self.layers["model"][0]

    @property
    def parts(self) -> list[tuple[str, str]]:
        """The further files of the model, as `with_parts` takes them."""
        kinds = {"projector": "mmproj", "adapter": "lora"}
        return [(kinds[kind], path.absolute().as_uri()) for kind in kinds for path in self._of(kind)]

    @property
    def size(self) -> int:
        """Returns the bytes of all files. Raises `OSError` for a file that is not there."""
        return sum(path.stat().st_size for kind in ("model", "projector", "adapter") for path in self._of(kind))

    def recipe(self) -> Recipe:
        """Returns the defaults that the model carries, without its template, which is in Go's language: the template in
        its weights takes its place. Parameters of a machine (`num_gpu`) are left out. Raises `InvalidModel`."""
        try:
            return self._recipe()
        except (*_ODD, OSError) as error:
            raise InvalidModel(f"what {self.name} carries for requests cannot be read ({error})") from None

    def _recipe(self) -> Recipe:
        texts = {
            kind: [durable.read(path.resolve(), _LARGEST).decode() for path in self._of(kind)] for kind in _CARRIED
        }
        parameters: dict[str, Any] = {}
        for text in texts["params"]:
            parameters |= json.loads(text)
        known = (*SamplingOptions.__struct_fields__, "num_ctx")
        messages = [message for text in texts["messages"] for message in json.loads(text)]
        return Recipe(
            system="\n".join(texts["system"]) or None,
            parameters={name: value for name, value in parameters.items() if name in known},
            messages=[(str(message["role"]), str(message["content"])) for message in messages],
            licences=[text for text in texts["license"] if text],
        )

    def _of(self, kind: str) -> Sequence[Path]:
        return self.layers.get(kind, ())


def models_in(root: Path) -> Iterator[KeptModel]:
    """Yields the models of a store; a manifest that is not a model is passed over."""
    manifests: list[Path] = []
    for name in _MANIFESTS:
        with contextlib.suppress(*_ODD, OSError):
            manifests += (root / name).glob("*/*/*/*")
    for path in sorted(manifests):
        with contextlib.suppress(*_ODD, OSError, InvalidReference):
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
        found.setdefault(layer["mediaType"].removeprefix(_TYPE), []).append(blobs / f"sha256-{digest.hex}")
    return found
