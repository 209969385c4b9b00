"""Decides which runners exist and which request gets which. `plan` decides, `Scheduler` acts."""

from modelrunner.scheduler.events import EventRecord
from modelrunner.scheduler.ledger import Ledger
from modelrunner.scheduler.memory import MemoryProbe, Probe
from modelrunner.scheduler.runnerfactory import MakeRunner, RunnerFactory
from modelrunner.scheduler.scheduler import Scheduler
from modelrunner.scheduler.slots import Lease
from modelrunner.scheduler.state import Phase
from modelrunner.scheduler.target import RetainedSettings, Target
from modelrunner.scheduler.views import KeptRunner, MemoryUse, RunnerView, SchedulerHealth, UnloadResult
from modelrunner.scheduler.why import Explanation, Figures, FitForecast, Fitting, Obstacle, Standing

__all__ = [
    "EventRecord",
    "Explanation",
    "Figures",
    "FitForecast",
    "Fitting",
    "KeptRunner",
    "Lease",
    "Ledger",
    "MakeRunner",
    "MemoryProbe",
    "MemoryUse",
    "Obstacle",
    "Phase",
    "Probe",
    "RetainedSettings",
    "RunnerFactory",
    "RunnerView",
    "Scheduler",
    "SchedulerHealth",
    "Standing",
    "Target",
    "UnloadResult",
]
