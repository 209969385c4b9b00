"""The proxies that the environment names: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, and the exceptions in NO_PROXY.

A variable concerns only the requests that need it: one that cannot be used ends those, and no others. There is no
standard; curl's manual (curl(1), "ENVIRONMENT") is what most programs follow.
"""

import ipaddress
import ssl
import urllib.request
from typing import TYPE_CHECKING

from modelrunner.errors import SourceFailed

if TYPE_CHECKING:
    import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def transport(certificates: ssl.SSLContext, proxy: str | None) -> "httpx.AsyncBaseTransport":
    """Returns a transport that sends each request through `proxy`, or else through the one of the environment. It
    raises `SourceFailed` for a request whose proxy cannot be used."""
    import httpx

    class Transport(httpx.AsyncBaseTransport):
        def __init__(self) -> None:
            self._transports: dict[str, httpx.AsyncHTTPTransport] = {}

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            way = proxy or named_for(request.url)
            if way not in self._transports:
                self._transports[way] = self._new_transport(way)
            return await self._transports[way].handle_async_request(request)

        def _new_transport(self, way: str) -> httpx.AsyncHTTPTransport:
            try:
                return httpx.AsyncHTTPTransport(verify=certificates, proxy=way or None, trust_env=False)
            except (ImportError, ValueError) as error:  # a proxy by SOCKS, or one whose address is none
                why = f"the proxy of this machine cannot be used ({error}): check HTTPS_PROXY and ALL_PROXY"
                raise SourceFailed(why) from None

        async def aclose(self) -> None:
            for each in self._transports.values():
                await each.aclose()

    return Transport()


def named_for(url: "httpx.URL") -> str:
    """Returns the address of the environment's proxy for requests to `url`, "" for none. This machine itself is never
    asked through one: requests without TLS must not leave it."""
    named = urllib.request.getproxies()
    proxy = named.get(url.scheme) or named.get("all") or ""
    if not proxy or is_loopback(url.host) or _is_excepted(url.host.lower(), url.port, named.get("no", "")):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_excepted(host: str, port: int | None, exceptions: str) -> bool:
    """Returns whether an entry of NO_PROXY means the host: a name with all names below it, an address or a network,
    each also with a port, or `*`. Any other entry means no host."""
    return any(_means(entry.strip().lower(), host, port) for entry in exceptions.split(","))


def _means(entry: str, host: str, port: int | None) -> bool:
    entry = entry.rpartition("://")[2]
    if entry == "*":
        return True
    address = literal(host)
    if address is not None and (network := _network(entry)) is not None:
        return address in network
    name, colon, wanted = entry.rpartition(":")
    if colon and wanted.isdecimal():
        if wanted != str(port):
            return False
        entry = name
    if address is not None:
        return (network := _network(entry)) is not None and address in network
    entry = entry.removeprefix("*").strip(".")
    return bool(entry) and (host.rstrip(".") == entry or host.rstrip(".").endswith(f".{entry}"))


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text.replace("[", "").replace("]", ""), strict=False)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Returns whether `host` is a name or address of this machine itself, without asking a name server."""
    address = literal(host)
    return address is not None and address.is_loopback


def literal(host: str) -> Address | None:
    """Returns the address if `host` is one, None for a name; `localhost` counts as an address."""
    try:
        return ipaddress.ip_address("127.0.0.1" if host.rstrip(".").lower() == "localhost" else host.strip("[]"))
    except ValueError:
        return None
