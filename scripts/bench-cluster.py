"""`scripts/bench cluster`: the time of one plan with many hosts, without engines.

Each host has 8 devices of 24 GiB; every second one holds a model, and of 500 models 50 are waited for by 2,000 requests
each. A model needs one device, and may run on any of any host.

--hosts N,N,...  (1,4,16,64,250,1000)  --rounds N (3) of which the fastest counts
"""

import argparse
import sys
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelrunner.scheduler.plan import plan
from modelrunner.scheduler.state import Group, Phase, Request, RunOption, RunPlace, Slot, Start, State
from modelrunner.types import Mode, RequiredMemory, RunnerKey

GIB = 1 << 30
NOW = 10_000.0
DEVICES = 8
MODELS, WAITED_FOR, REQUESTS = 500, 50, 2_000


def key(model: int) -> RunnerKey:
    return RunnerKey("engine", f"model-{model}", Mode.COMPLETION)


def on(device: int) -> RequiredMemory:
    return RequiredMemory(GIB, tuple(20 * GIB if number == device else 0 for number in range(DEVICES)))


def state(hosts: int) -> State:
    names = [f"host-{number}" for number in range(hosts)]
    places = [(name, device) for name in names for device in range(DEVICES)]
    slots = [
        Slot(
            key(WAITED_FOR + number % (MODELS - WAITED_FOR)),
            Phase.READY,
            on(device),
            last_used=NOW - 10.0 - number % 100,
            keep_alive=300.0,
            ready_at=0.0,
            option=RunOption(on(device), place=RunPlace((device,), name)),
            number=number // (MODELS - WAITED_FOR),
        )
        for number, (name, device) in enumerate(places[::2])
    ]
    options = tuple(RunOption(on(device), 0, RunPlace((device,), name), i) for i, (name, device) in enumerate(places))
    groups = tuple(
        Group(key(model), tuple(Request(model * REQUESTS + i, NOW) for i in range(REQUESTS)), options, f"model-{model}")
        for model in range(WAITED_FOR)
    )
    return State(groups, tuple(slots), {name: RequiredMemory(256 * GIB, (24 * GIB,) * DEVICES) for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="1,4,16,64,250,1000")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"{'hosts':>6} {'runners':>8} {'a plan, ms':>11} {'starts':>7}")
    for hosts in map(int, given.hosts.split(",")):
        made = state(hosts)
        seconds = min(timeit.repeat(lambda: plan(made, NOW), number=1, repeat=given.rounds))  # noqa: B023
        starts = sum(isinstance(action, Start) for action in plan(made, NOW))
        print(f"{hosts:>6} {len(made.slots):>8} {1000 * seconds:>11.1f} {starts:>7}", flush=True)


if __name__ == "__main__":
    main()
