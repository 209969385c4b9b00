"""The runner that a request wants of the scheduler."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from modelrunner.defaults import RequestParameters
from modelrunner.engineapi import OPENAI, EngineApi
from modelrunner.types import NO_LIMITS, KeepAlive, RequestLimits, RunnerKey, RunSpec


class Replicas(NamedTuple):
    """How many runners a model may have at once, and how many it has where there is room."""

    least: int = 1
    most: int = 1


ONE = Replicas()


@dataclass(frozen=True, slots=True)
class Target:
    """The runner that a request wants: its key, how to start it, and the model's own settings. Presets of one model
    have equal keys, and each its own settings."""

    key: RunnerKey
    spec: RunSpec
    keep_alive: KeepAlive
    pinned: bool = False
    limits: RequestLimits = NO_LIMITS
    recording: bool = False
    replicas: Replicas = ONE
    parameters: RequestParameters | None = None
    hosts: tuple[str, ...] = ()  # the names or labels of the only hosts that may run it, none for all
    fallback: str | None = None  # the model that answers if there is never memory for this one
    api: EngineApi = OPENAI  # of the runner's engine, as far as it is known before it runs

    @property
    def grows(self) -> bool:
        """True if the model begins with a runner of one sequence, which one with more may follow."""
        return self.spec.grows and self.replicas.most == 1

    @property
    def model_id(self) -> str:
        """The ID of the model that is asked."""
        return self.spec.model_id

    @property
    def name(self) -> str:
        """The model's name in messages."""
        return self.spec.bundle.name


class RetainedSettings(NamedTuple):
    """The settings of a model that hold without another load."""

    keep_alive: KeepAlive
    pinned: bool = False
    limits: RequestLimits = NO_LIMITS
    replicas: Replicas = ONE
    parameters: RequestParameters | None = None
    hosts: tuple[str, ...] = ()

    def applied(self, target: Target) -> Target:
        return replace(target, **self._asdict())
