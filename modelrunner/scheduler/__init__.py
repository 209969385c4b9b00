"""Decides which runners exist and which request gets which. `plan` decides, `Scheduler` acts."""

from modelrunner.scheduler.events import EventRecord
from modelrunner.scheduler.host import Held, Host
from modelrunner.scheduler.ledger import Ledger
from modelrunner.scheduler.localhost import LocalHost
from modelrunner.scheduler.memory import MemoryProbe
from modelrunner.scheduler.scheduler import Scheduler
from modelrunner.scheduler.slots import Lease
from modelrunner.scheduler.state import Phase
from modelrunner.scheduler.target import Replicas, RetainedSettings, Target
from modelrunner.scheduler.views import HealthState, KeptRunner, MemoryUse, RunnerView, UnloadResult
from modelrunner.scheduler.why import Explanation, Figures, FitForecast, Fitting, Obstacle, Standing

__all__ = [
    "EventRecord",
    "Explanation",
    "Figures",
    "FitForecast",
    "Fitting",
    "HealthState",
    "Held",
    "Host",
    "KeptRunner",
    "Lease",
    "Ledger",
    "LocalHost",
    "MemoryProbe",
    "MemoryUse",
    "Obstacle",
    "Phase",
    "Replicas",
    "RetainedSettings",
    "RunnerView",
    "Scheduler",
    "Standing",
    "Target",
    "UnloadResult",
]
