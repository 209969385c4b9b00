"""Ends a task of asyncio for certain."""

import asyncio
from typing import Any


async def stopped(task: "asyncio.Task[Any]", patience: float | None = None) -> None:
    """Cancels `task` and waits for its end. If the caller is cancelled meanwhile, cancels `task` again and raises
    `CancelledError` afterwards. A task that has not ended after `patience` seconds is cancelled once more, which ends
    an engine at once."""
    cancelled = False
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait([task], timeout=patience)
        except asyncio.CancelledError:
            cancelled = True
    if not task.cancelled():
        task.exception()
    if cancelled:
        raise asyncio.CancelledError


async def all_stopped(*tasks: "asyncio.Task[Any]") -> None:
    """Cancels `tasks` once, and waits for their ends as `settled` does."""
    for task in tasks:
        task.cancel()
    await settled(*tasks)


async def settled(*tasks: "asyncio.Future[Any]") -> None:
    """Returns when all `tasks` have ended, however they do. If the caller is cancelled meanwhile, raises
    `CancelledError` then."""
    cancelled = False
    while left := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError:
            cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
    if cancelled:
        raise asyncio.CancelledError
