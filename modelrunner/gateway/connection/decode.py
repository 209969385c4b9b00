"""Decodes large bodies in a thread, so that no other request waits."""

import asyncio
from collections.abc import Callable

from modelrunner.concurrency.threads import BODIES
from modelrunner.gateway.dialects.dialect import Dialect, Fields

LARGE = 512 << 10
"""Bytes of a body above which a thread decodes it: about the size that takes a millisecond."""


class Decoding:
    """The decoding of a large body, which is the `Work` of its connection. At its end it calls `done` with the fields
    or the error; `cancel` calls `given_up` with the size of the body in bytes instead."""

    def __init__(
        self,
        dialect: Dialect,
        body: bytes,
        done: Callable[[Fields | Exception], None],
        given_up: Callable[[int], None],
    ) -> None:
        self._size = len(body)
        self._done = done
        self._given_up = given_up
        self._found = asyncio.get_running_loop().run_in_executor(BODIES, _decoded, dialect, body)
        self._found.add_done_callback(self._tell)

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def cancel(self) -> None:
        self._found.remove_done_callback(self._tell)
        self._found.cancel()
        self._given_up(self._size)

    def _tell(self, found: "asyncio.Future[Fields | Exception]") -> None:
        self._done(found.result())


def _decoded(dialect: Dialect, body: bytes) -> Fields | Exception:
    try:
        return dialect.read(body)
    except Exception as error:
        return error
