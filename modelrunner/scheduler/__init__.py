"""Decides which runners exist and which request gets which. `plan` decides, `Scheduler` acts."""

from modelrunner.scheduler.factory import MakeRunner, RunnerFactory
from modelrunner.scheduler.ledger import Ledger
from modelrunner.scheduler.memory import MemoryProbe, Probe
from modelrunner.scheduler.scheduler import Scheduler
from modelrunner.scheduler.slots import Lease, Target

__all__ = ["Lease", "Ledger", "MakeRunner", "MemoryProbe", "Probe", "RunnerFactory", "Scheduler", "Target"]
