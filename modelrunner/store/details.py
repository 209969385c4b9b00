"""A model's chat template, its licences, and its defaults for requests."""

import hashlib
from dataclasses import dataclass

from modelrunner import durable
from modelrunner.defaults import ModelDefaults
from modelrunner.errors import InvalidModel
from modelrunner.store.describe import TEMPLATES
from modelrunner.store.manifests import parse
from modelrunner.store.mediatypes import LICENSE_TYPE, MODELPACK_DOC
from modelrunner.store.store import Store

LARGEST_LICENCE = 1 << 20  # bytes
_LICENCE_NAMES = ("license", "licence", "copying")


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """`template` is a chat template in Jinja, "" without one; the licences are texts."""

    template: str
    licences: tuple[str, ...]
    defaults: ModelDefaults | None

    @property
    def template_digest(self) -> str:
        """Returns the sha256 of the template in UTF-8, `sha256:HEX`; "" without one."""
        return f"sha256:{hashlib.sha256(self.template.encode()).hexdigest()}" if self.template else ""


def details_of(store: Store, text: str) -> ModelDetails:
    """Returns the details of the model `text`. Reads small files. Raises the errors of `Store.bundle`, and
    `StorageFailed`."""
    bundle = store.bundle(text)
    templates = (each for key, each in bundle.header.metadata.items() if key.startswith(TEMPLATES))
    template = next((each for each in templates if isinstance(each, str)), "")
    return ModelDetails(template, tuple(_licences(store, text)), bundle.defaults)


def _licences(store: Store, text: str) -> list[str]:
    licences = []
    for layer in parse(store.manifest(text)).layers:
        stem = layer.path.rpartition("/")[2].lower()
        is_named = layer.media_type.startswith(MODELPACK_DOC) and stem.startswith(_LICENCE_NAMES)
        if layer.media_type == LICENSE_TYPE or is_named:
            blob = store.have(layer.digest)
            if blob is None:
                raise InvalidModel(f"its licence {layer.digest} is missing or damaged: pull the model again")
            with durable.translated("reading a licence", store.data):
                if blob.size <= LARGEST_LICENCE:
                    licences.append(durable.read(blob.path).decode("utf-8", "replace"))
    return licences
