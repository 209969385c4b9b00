"""The HTTP client that sources download with, and where it lets itself be redirected."""

import asyncio
import contextlib
import ipaddress
import socket
from typing import TYPE_CHECKING

from modelrunner.errors import SourceFailed

if TYPE_CHECKING:
    import httpx

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def new_client(endpoint: str, *, transport: "httpx.AsyncBaseTransport | None" = None) -> "httpx.AsyncClient":
    """A client that follows redirects to public addresses only, unless the endpoint's own is not public: a hub, or
    somebody who has taken it over, must not make the daemon talk to this machine's services. Takes some 50 ms (the
    certificates): call it in a thread."""
    import httpx

    origin = httpx.URL(endpoint)

    async def check(request: httpx.Request) -> None:
        if request.url.host != origin.host or request.url.scheme != origin.scheme:
            await _check_hop(request.url, origin)

    return httpx.AsyncClient(
        follow_redirects=True,
        max_redirects=10,
        timeout=httpx.Timeout(30.0, connect=10.0),
        event_hooks={"request": [check]},
        transport=transport,
    )


async def _check_hop(target: "httpx.URL", origin: "httpx.URL") -> None:
    if target.scheme != "https" and origin.scheme == "https":
        raise SourceFailed(f"the source redirects to {target.host} without TLS; this is not followed")
    private_origin = any(map(_is_private, await _addresses(origin)))
    for address in await _addresses(target):
        if address.is_link_local or address.is_multicast or (_is_private(address) and not private_origin):
            raise SourceFailed(
                f"the source redirects to {target.host}, which is no public address; this is not followed"
            )


def _is_private(address: _Address) -> bool:
    return not address.is_global


async def _addresses(url: "httpx.URL") -> list[_Address]:
    """None where the name cannot be resolved here: then a proxy resolves it, or the connection fails by itself."""
    with contextlib.suppress(socket.gaierror):
        found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port or 443, type=socket.SOCK_STREAM)
        return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    return []
