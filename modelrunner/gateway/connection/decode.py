"""Reads large bodies in a thread, so that no other request waits."""

import asyncio
from collections.abc import Callable

from modelrunner.concurrency.threads import BODIES
from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.calls import Fields
from modelrunner.gateway.uploads import RequestUpload

LARGE = 512 << 10
"""Bytes of JSON above which a thread decodes it: about the size that takes a millisecond."""


class Decoding:
    """The reading of a large `body` or an upload, which is the `Work` of its connection. `read` returns the fields. At
    the end `done` gets them, or the error. After `cancel` it is `given_up` instead, once the thread no longer reads:
    the number of a file that is closed too early may already be that of another client's connection."""

    def __init__(
        self,
        body: bytes | RequestUpload,
        read: Callable[[], Fields],
        done: Callable[[Fields | Exception], None],
        given_up: Callable[[], None],
    ) -> None:
        self._read = read
        self._done = done
        self._given_up = given_up
        self._over = self._reading = False
        if isinstance(body, RequestUpload):
            body.end(self._begin)
        else:
            self._begin(None)

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def cancel(self) -> None:
        self._over = True
        if not self._reading:
            self._given_up()

    def _begin(self, error: ModelRunnerError | None) -> None:
        loop = asyncio.get_running_loop()
        if error is not None:
            loop.call_soon(self._tell, error)
            return
        self._reading = True
        reading = loop.run_in_executor(BODIES, _attempt, self._read)
        reading.add_done_callback(lambda ended: self._tell(ended.result()))

    def _tell(self, result: Fields | Exception) -> None:
        if not self._over:
            self._done(result)
        elif self._reading:
            self._given_up()


def _attempt(read: Callable[[], Fields]) -> Fields | Exception:
    try:
        return read()
    except Exception as error:
        return error
