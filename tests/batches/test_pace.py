"""When a batch waits for clients, and how much of it goes to the engine together."""

from modelrunner.batches.pace import MOST, Pace


class Clients:
    """Clients of model `other` that wait for the next `looks` looks, each of which takes `step` seconds."""

    def __init__(self, looks: int, step: float = 0.01) -> None:
        self.looks, self.step = looks, step
        self.now = 100.0
        self.asked = 0

    def awaited(self, beside: str) -> bool:
        self.now += self.step
        self.asked += 1
        self.looks -= 1
        return beside != "other" and self.looks >= 0

    def clock(self) -> float:
        return self.now


def of(clients: Clients) -> Pace:
    return Pace(clients.awaited, clients.clock)


async def test_a_batch_waits_until_no_client_waits_for_another_model() -> None:
    clients = Clients(3)
    made = of(clients)
    made.note(1.0, 1)
    await made.turn("mine")
    assert clients.asked == 4
    await of(clients := Clients(3)).turn("other")
    assert clients.asked == 1, "a client of its own model is the scheduler's matter"


async def test_a_batch_does_not_wait_for_ever() -> None:
    clients = Clients(10**9)
    made = of(clients)
    made.note(0.1, 10)
    await made.turn("mine")
    assert clients.asked <= 0.1 * 4 / clients.step + 2, "four times what its last lines took"
    clients.asked = 0
    made.note(1e6, 1)
    await made.turn("mine")
    assert clients.asked <= 2.0 / clients.step + 2


async def test_little_goes_together_while_clients_are_there() -> None:
    """With an engine that takes 5 ms, and 3 ms for each line."""
    clients = Clients(0)
    made = of(clients)

    def settled() -> int:
        for _ in range(100):
            made.note(0.005 + 0.003 * made.group(), made.group())
        return made.group()

    assert (settled(), made.groups()) == (MOST, 2)
    clients.looks = 1
    await made.turn("mine")
    assert settled() in (4, 5), "20 ms of work"
    assert made.groups() == 1
    clients.now += 3600
    assert (made.group(), made.groups()) == (MOST, 2)
    for _ in range(100):
        made.note(1.0, made.group())
    assert made.group() == 1
