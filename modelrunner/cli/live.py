"""Follows the state of the daemon."""

import time
from collections.abc import Iterator

from modelrunner import wire
from modelrunner.cli.client import HttpClient, decode
from modelrunner.cli.output import note
from modelrunner.errors import AnswerBroken, DaemonUnreachable

_AGAIN = 0.5  # seconds between two attempts to reach a daemon that has ended


def states(client: HttpClient) -> Iterator[wire.Now]:
    """Yields the state now and after every change, and waits for the next daemon if this one ends. Raises
    `DaemonUnreachable` if no daemon runs at the beginning."""
    begun = False
    while True:
        try:
            with client.open("GET", "/engines/now", headers={"Accept": "text/event-stream"}) as response:
                for event in client.events(response):
                    if event.name == "now":
                        begun = True
                        yield decode(event.data, wire.Now)
        except (DaemonUnreachable, AnswerBroken):
            if not begun:
                raise
        note("the daemon has ended; waiting for the next one, Ctrl-C ends")
        time.sleep(_AGAIN)
