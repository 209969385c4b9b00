"""Names that stand for models: which model answers to one, and in which API families."""

from dataclasses import dataclass
from enum import StrEnum


class AliasPolicy(StrEnum):
    """Which of an alias's models answers: the first that is here; the first that is loaded, or fits in the memory that
    is free now; or the first that is loaded. Without such a one, the first that is here."""

    FIRST = "first"
    FITS = "fits"
    LOADED = "loaded"


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that programs insist on. `models` are references, at least one; `families` are those of the APIs in which
    the name is an alias, empty for all."""

    models: tuple[str, ...]
    policy: AliasPolicy = AliasPolicy.FIRST
    families: frozenset[str] = frozenset()

    def holds_for(self, family: str) -> bool:
        return not self.families or family in self.families
