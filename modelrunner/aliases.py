"""Names that stand for models: the model that answers for a name, and the API families in which it does."""

from dataclasses import dataclass
from enum import StrEnum


class AliasPolicy(StrEnum):
    """The choice among an alias's models: the first that is here; the first that is loaded, or fits in the memory that
    is free now; or the first that is loaded. If no model meets the condition, the first that is here answers."""

    FIRST = "first"
    FITS = "fits"
    LOADED = "loaded"


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that programs insist on. `models` are references, at least one; `families` are the API families in which
    the name is an alias, empty for all."""

    models: tuple[str, ...]
    policy: AliasPolicy = AliasPolicy.FIRST
    families: frozenset[str] = frozenset()

    def holds_for(self, family: str) -> bool:
        return not self.families or family in self.families
