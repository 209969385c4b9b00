"""The first part of `scripts/bench cluster`: the time of one plan with many hosts, without engines.

Each host has 8 devices of 24 GiB, and of 500 models 50 are waited for by 2,000 requests each. A model needs one device,
and may run on any of any host. Four columns: every second device holds a model, and the others are free; all hold one
that nobody uses, and whose time has come; all are in use, and some may be drained; all are in use, and none may go yet.

--hosts N,N,...  (1,4,16,64,250,1000)  --rounds N (3) of which the fastest counts. The times are the processor's.
"""

import argparse
import sys
import time
import timeit
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelrunner.scheduler.plan import plan
from modelrunner.scheduler.state import Group, Options, Phase, Request, RunOption, RunPlace, Slot, State
from modelrunner.types import Mode, RequiredMemory, RunnerKey

GIB = 1 << 30
NOW = 10_000.0
DEVICES = 8
MODELS, WAITED_FOR, REQUESTS = 500, 50, 2_000


def key(model: int) -> RunnerKey:
    return RunnerKey("engine", f"model-{model}", Mode.COMPLETION)


def on(device: int) -> RequiredMemory:
    return RequiredMemory(GIB, tuple(20 * GIB if number == device else 0 for number in range(DEVICES)))


class Case(NamedTuple):
    """Of all devices each `taken`-th holds a model, which has so many `leases`. Requests have waited for `waited` s."""

    taken: int
    leases: int
    waited: float


CASES = {"free": Case(2, 0, 0.0), "idle": Case(1, 0, 0.0), "busy": Case(1, 1, 30.0), "none may go": Case(1, 1, 0.0)}


def state(hosts: int, case: Case) -> State:
    names = [f"host-{number}" for number in range(hosts)]
    places = [(name, device) for name in names for device in range(DEVICES)]
    slots = [
        Slot(
            key(WAITED_FOR + number % (MODELS - WAITED_FOR)),
            Phase.READY,
            on(device),
            case.leases,
            last_used=NOW - 10.0 - number % 100,
            keep_alive=300.0,
            load_seconds=2.0 + number % 7,
            ready_at=0.0,
            interactive=case.leases,
            option=RunOption(on(device), place=RunPlace((device,), name)),
            number=number // (MODELS - WAITED_FOR),
        )
        for number, (name, device) in enumerate(places[:: case.taken])
    ]
    options = [RunOption(on(device), 0, RunPlace((device,), name), i) for i, (name, device) in enumerate(places)]
    groups = tuple(
        Group(
            key(model),
            tuple(Request(model * REQUESTS + i, NOW - case.waited) for i in range(REQUESTS)),
            Options(options),
            f"model-{model}",
        )
        for model in range(WAITED_FOR)
    )
    return State(groups, tuple(slots), {name: RequiredMemory(256 * GIB, (24 * GIB,) * DEVICES) for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="1,4,16,64,250,1000")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"{'hosts':>6}" + "".join(f"{name:>14}, ms" for name in CASES))
    for hosts in map(int, given.hosts.split(",")):
        print(f"{hosts:>6}", end="")
        for case in CASES.values():
            made = state(hosts, case)
            seconds = min(
                timeit.repeat(partial(plan, made, NOW), timer=time.process_time, number=1, repeat=given.rounds)
            )
            print(f"{1000 * seconds:>18.1f}", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
