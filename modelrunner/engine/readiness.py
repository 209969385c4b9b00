"""Decides when a starting engine is ready, and when its start has stalled."""

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from secrets import token_hex

from modelrunner.engine.connections import UpstreamPool
from modelrunner.engineapi import OPENAI
from modelrunner.errors import EngineFailed, EngineProtocolError, TimedOut
from modelrunner.processes.processtree import Activity, activity_of, strangers_on
from modelrunner.types import Endpoint

_HEALTH_TIMEOUT = 5.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25  # seconds
_LONGEST_START = 12  # times the stall limit, however busy the engine seems


class PortTaken(EngineFailed):
    """Another process listens on the TCP port of the engine."""


def is_free(endpoint: Endpoint) -> bool:
    """Returns True if an engine could listen there. A Unix socket is always free, because it lies in a folder of
    ours."""
    if endpoint.host is None or endpoint.port is None:
        return True
    with socket.socket(socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores connections that have ended
        try:
            probe.bind((endpoint.host, endpoint.port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def free_port() -> Endpoint:
    """Returns a port of 127.0.0.1 that is free now, with a new key. Another process may take it before the engine
    listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        headers = (("Authorization", f"Bearer {token_hex(16)}"),)
        return Endpoint(host="127.0.0.1", port=probe.getsockname()[1], headers=headers)


def pause(starting: float, silent: float) -> float:
    """Returns the seconds between two questions to an engine: 0.01 at first, at most 0.25. The engine has been
    `starting` for so many seconds, and `silent` for so many since its last line."""
    return min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, min(starting / 100, silent / 10)))


class Readiness:
    """Watches one engine from its start. `process` tells its process, None while there is none. The runner reports
    the engine's interface (`api`) and each logged line."""

    def __init__(
        self, upstream: UpstreamPool, process: Callable[[], int | None], stall_limit: float, clock: Callable[[], float]
    ) -> None:
        self._process = process
        self.api = OPENAI
        self._upstream = upstream
        self._stall_limit = stall_limit
        self._clock = clock
        self._began = self._progressed = self._sampled = self._heard = clock()
        self._activity = Activity(0.0, 0)
        self._news = asyncio.Event()
        self._said_ready = False

    def heard(self, line: str) -> None:
        """Is called for each line that the engine logs."""
        self._said_ready |= self.api.ready_line in line
        self._progressed = self._heard = self._clock()
        self._news.set()

    async def wait(self) -> None:
        """Returns once the engine is ready as its interface says: it answers, and has logged its line. It asks every 10
        ms at first, later less often, but at least every quarter of a second, and soon after each line that the engine
        logs. Raises `TimedOut` after `stall_limit` seconds without progress (a log line, processor time, reading from
        disk), twelve times as long in all or `EngineApi.start_limit`, `PortTaken` if another process listens on the
        engine's port."""
        self._began = self._progressed = self._sampled = self._clock()
        while not (await self._answers() and await self._is_ours()):
            await self._pause()
            await self._check_progress()

    async def _pause(self) -> None:
        """Waits until the next question, or the next log line: the last line before the engine serves may come after
        half a minute of loading."""
        now = self._clock()
        seconds = pause(now - self._began, now - self._heard)
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
                await asyncio.sleep(_SHORTEST_PAUSE)  # a flood of lines is no flood of questions

    async def _answers(self) -> bool:
        if self._process() is None or (self.api.ready_line and not self._said_ready):
            return False
        try:
            status, _ = await self._upstream.fetch("GET", self.api.health or "/", timeout=_HEALTH_TIMEOUT)
        except (OSError, EngineProtocolError):
            return False
        return status == 200 or self.api.health is None

    async def _is_ours(self) -> bool:
        """Returns False if another program may have answered on the TCP port. A Unix socket lies in a private
        folder."""
        endpoint = self._upstream.endpoint
        if endpoint.host is None or endpoint.port is None or self.api.listens_elsewhere:
            return True
        if (pid := self._process()) is None:
            return False
        strangers = await asyncio.to_thread(strangers_on, pid, endpoint.host, endpoint.port)
        if strangers:
            who = f"process {strangers[0]}" if strangers[0] else "another user's process"
            raise PortTaken(f"port {endpoint.port} is taken by {who}, which is not this engine: stop it, or try again")
        return strangers is not None

    async def _check_progress(self) -> None:
        now = self._clock()
        passed = now - self._sampled
        if (pid := self._process()) is not None and passed >= self._stall_limit / 10:
            activity = await asyncio.to_thread(activity_of, pid)
            if activity.since(self._activity, passed):
                self._progressed = now
            self._activity, self._sampled = activity, now
        if now - self._progressed >= self._stall_limit:
            raise TimedOut(f"the engine made no progress for {self._stall_limit:g} seconds")
        limit = self.api.start_limit
        if now - self._began >= (_LONGEST_START * self._stall_limit if limit is None else limit):
            raise TimedOut(f"the engine was not ready after {now - self._began:.0f} seconds")
