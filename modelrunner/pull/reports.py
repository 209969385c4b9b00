"""What sources and pulls tell of models: where one is from, whether a newer one is there, which are offered."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """Where a name of a model was pulled from. `version` is a commit, a digest or a version; "" if it has none."""

    name: str
    source: str
    version: str


@dataclass(frozen=True, slots=True)
class ModelUpdate:
    """Whether the source of a model has a newer one; None where it cannot be known, and `reason` says why."""

    name: str
    source: str
    newer: bool | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that a hub offers: `name` can be pulled; `gated` ones ask for an agreement first."""

    name: str
    downloads: int
    likes: int
    task: str
    gated: bool
