"""Deaths at random moments while clients ask: every request is answered once or told why it is not, an answer comes
again soon, and no process is left. With the double of Ray; `test_ray.py` has some of it with Ray itself."""

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.cluster.rig import WORDS, Network, Rig, killed
from tests.e2e.daemons import until
from tests.waiting import HUNG, has_ended

UNRAISABLE = "pytest.PytestUnraisableExceptionWarning"
# httpx leaves a socket open that it could not connect: while the head is dead.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("ResourceWarning", UNRAISABLE)]
TIMES = int(os.environ.get("DEATHS", "20"))
NETWORKS = pytest.mark.skipif(not Network.is_possible(), reason="networks of one's own need root, ip and iptables")
ANSWER = "".join(f"w{number} " for number in range(WORDS))


@dataclass
class Load:
    """Clients that ask one after the other until `end`: half of them for streams. `outcomes` counts how each request
    ended; `wrong` has what may never be: no end, or words that are not those of one answer."""

    rig: Rig
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    """When requests began that were answered in whole."""

    def __post_init__(self) -> None:
        self._ending = threading.Event()
        ways = [(model, stream) for model in self.rig.models for stream in (False, True)]
        self._threads = [threading.Thread(target=self._ask, args=way) for way in ways]
        for thread in self._threads:
            thread.start()

    def _ask(self, model: str, stream: bool) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": "x"}], "stream": stream}
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                with self.rig.head.client(HUNG) as client:
                    answer = client.post("/engines/mine/v1/chat/completions", json=body)
                said = _words(answer.text) if stream else _whole(answer.text)
                error = '"error"' in answer.text
            except httpx.TimeoutException:
                self.wrong.append("a request was not answered")
                return
            except httpx.TransportError:  # the head is dead
                self.outcomes["no head"] += 1
                time.sleep(0.05)
                continue
            if answer.status_code == 200 and said == ANSWER and not error:
                self.outcomes["whole"] += 1
                self.answered.append(began)
            elif answer.status_code == 200 and stream and error and ANSWER.startswith(said):
                self.outcomes["cut, with its error"] += 1
            elif answer.status_code >= 500 and error:
                self.outcomes[f"error {answer.status_code}: {answer.json()['error']['message'][:160]}"] += 1
            else:
                self.wrong.append(f"{answer.status_code}: {answer.text[:500]}")

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(2 * HUNG)


def _words(events: str) -> str:
    lines = [line[6:] for line in events.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line).get("choices", ())]
    return "".join(delta.get("content") or "" for delta in deltas)


def _whole(text: str) -> str:
    choices = json.loads(text).get("choices") or [{"message": {"content": ""}}]
    return str(choices[0]["message"]["content"])


def engine(rig: Rig) -> bool:
    found = rig.engines()
    return bool(found) and killed(random.choice(found))


def host(rig: Rig) -> bool:
    return killed(rig.host(random.choice("bc")))


def actor(rig: Rig) -> bool:
    return killed(rig.actor(random.choice("bc")))


def node(rig: Rig) -> bool:
    """All of it: Ray tells that it is gone, and another one of its name comes. Ray ends what ran there."""
    name = random.choice("bc")
    if (there := rig.actor(name)) is None:
        return False
    rig.die(name)
    killed(there)
    until(lambda: rig.host(name) is None)
    rig.join(name)
    return True


def cut_off(rig: Rig) -> bool:
    """Nothing is closed, and nothing comes from there, until the head has given it up."""
    name = random.choice("bc")
    rig.networks[name].cut(True)
    until(lambda: rig.states().get(name) in ("silent", "gone"))
    rig.networks[name].cut(False)
    return True


def ray_head(rig: Rig) -> bool:
    """Then a program that speaks with Ray ends, and all of its actors."""
    return killed(rig.members())


def head(rig: Rig) -> bool:
    """Another one comes at once."""
    rig.head.kill()
    rig.head.start()
    return True


QUICK: list[Callable[[Rig], bool]] = [engine, host, actor, node]
KINDS = [*QUICK, cut_off, ray_head, head]


def die(rig: Rig, load: Load, kind: Callable[[Rig], bool]) -> float:
    """One death at a random moment. Returns the seconds until a request that began after it was answered."""
    time.sleep(random.uniform(0.0, 0.5))
    began = time.monotonic()
    until(lambda: kind(rig))
    until(lambda: any(at > began for at in load.answered[-100:]) or load.wrong)
    assert not load.wrong
    took = time.monotonic() - began
    until(lambda: sorted(rig.states().values()) == ["ready", "ready"])
    return took


@pytest.fixture(autouse=True)
def seed() -> None:
    """`random` as before, if DEATHS_SEED names what a run printed."""
    number = os.environ.get("DEATHS_SEED") or str(time.time_ns())
    random.seed(number)
    print(f"DEATHS_SEED={number}")


def run(folder: Path, kinds: Iterable[Callable[[Rig], bool]], *, apart: bool = False) -> None:
    rig = Rig(folder, apart=apart)
    try:
        rig.start()
        rig.add_models()
        load = Load(rig)
        took: dict[str, list[float]] = {}
        try:
            until(lambda: load.answered or load.wrong)
            for kind in kinds:
                print(kind.__name__, rig.states())
                took.setdefault(kind.__name__, []).append(die(rig, load, kind))
        finally:
            load.end()
        assert not load.wrong
        print(f"\n{dict(load.outcomes)}")
        for name, times in took.items():
            middle = sorted(times)[len(times) // 2]
            print(f"{name:>10}: {len(times)} times, answered again after {middle:.1f} s (most {max(times):.1f})")
        known = {runner["pid"] for runner in rig.head.runners()}
        until(lambda: {process.pid for process in rig.engines()} <= known)
    finally:
        if rig.head.process is not None:
            rig.head.kill()  # what is left then must end by itself
        rig.close()


def test_a_few_deaths(tmp_path: Path) -> None:
    run(tmp_path, random.sample(QUICK, 2))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=kind.__name__, marks=[NETWORKS] * (kind is cut_off)) for kind in KINDS]
)
def test_many_deaths(tmp_path: Path, kind: Callable[[Rig], bool]) -> None:
    run(tmp_path, [kind] * TIMES, apart=kind is cut_off)


@NETWORKS
def test_five_minutes_of_any_death(tmp_path: Path) -> None:
    end = time.monotonic() + 300.0
    run(tmp_path, (random.choice(KINDS) for _ in iter(lambda: time.monotonic() < end, False)), apart=True)


@pytest.mark.nightly
@NETWORKS
def test_a_host_that_is_cut_off_for_good_ends_its_engines(tmp_path: Path) -> None:
    """Nothing was closed, and Ray's actor lives on."""
    rig = Rig(tmp_path, ("b",), ("m",), apart=True)
    try:
        rig.start()
        rig.add_models()
        assert rig.ask("m").status_code == 200
        [engine] = rig.engines()
        rig.networks["b"].cut(True)
        began = time.monotonic()
        until(lambda: has_ended(engine))
        print(f"the engine ended after {time.monotonic() - began:.1f} s")
        rig.networks["b"].cut(False)
        until(lambda: rig.states() == {"b": "ready"})
        assert rig.ask("m").status_code == 200
    finally:
        rig.close()
