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
