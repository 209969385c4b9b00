"""What a request does that has to wait: its work in a task, and signs of life in the client's stream."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import TYPE_CHECKING, Any

from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.interfaces import Inference

if TYPE_CHECKING:
    from modelrunner.gateway.pipeline import Pipeline


log = logging.getLogger(__name__)


async def guarded(work: Coroutine[Any, Any, None], request_id: str, refuse: Callable[[ModelRunnerError], None]) -> None:
    """The edge of a request: what `work` raises is its answer; a fault of ours is logged, and answered as one."""
    try:
        await work
    except ModelRunnerError as error:
        refuse(error)
    except Exception:
        log.exception("request %s", request_id)
        refuse(ModelRunnerError("a fault of modelrunner; its log says more under this request's ID"))


class SignsOfLife:
    """What the dialect of `ask` says while the request waits, again and again until `stop`. `say` writes it to the
    client. The first comes after a while, or at once for a client that asked for progress."""

    def __init__(self, pipeline: "Pipeline", ask: Inference, say: Callable[[bytes], None]) -> None:
        self._pipeline, self._ask, self._say = pipeline, ask, say
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(0.0 if ask.terms.progress else pipeline.limits.progress_after, self._give)

    def stop(self) -> None:
        self._next.cancel()

    def _give(self) -> None:
        ask = self._ask
        progress = self._pipeline.progress(ask) if ask.terms.progress else None
        self._say(ask.terms.route.dialect.waiting(progress, perf_counter() - ask.arrived))
        every = 1.0 if progress is not None else self._pipeline.limits.comment_every
        self._next = self._loop.call_later(every, self._give)
