"""Reports of sources and pulls about models: the origin, a newer version, the models on offer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """The source of a model's name. `version` is a commit, a digest or a version; "" if it has none."""

    name: str
    source: str
    version: str


@dataclass(frozen=True, slots=True)
class ModelUpdate:
    """The answer to whether the source of a model has a newer one; None if unknown, and `reason` says why."""

    name: str
    source: str
    newer: bool | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that a hub offers: `name` can be pulled; a `gated` one requires an agreement first."""

    name: str
    downloads: int
    likes: int
    task: str
    gated: bool
