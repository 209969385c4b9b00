"""An existing Ray cluster, seen from outside. Ray itself tries for a quarter of an hour before it says that nobody
answers."""

import asyncio

from modelrunner import BackendUnavailable

_PATIENCE = 5.0  # seconds


async def check_reachable(address: str) -> None:
    """Raises `BackendUnavailable` unless something listens at `address` (`host:port`, `ray://host:port`; "auto" is
    Ray's own to find)."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        async with asyncio.timeout(_PATIENCE):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError, OverflowError) as error:  # a timeout is an OSError
        raise BackendUnavailable(
            f"the Ray cluster at {address} cannot be reached ({error or 'no answer'}): check `ray-address`, and that "
            "the cluster runs there (`ray status`)"
        ) from None
    writer.close()
