"""The beat of looks that recur: those that wait here wake an idle process together, and not each on its own."""

import asyncio


async def beat(seconds: float) -> None:
    """Waits until the time of the event loop is the next whole multiple of `seconds`, which is above 0."""
    await asyncio.sleep(seconds - asyncio.get_running_loop().time() % seconds)
