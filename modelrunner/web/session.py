"""The HTTP client of the sources: it limits the addresses that it connects to and the size of an answer, and explains a
failed connection."""

import asyncio
import errno
import functools
import ipaddress
import re
import socket
import ssl
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelrunner.errors import Forbidden, SourceFailed
from modelrunner.web import proxies
from modelrunner.web.proxies import Address, literal

if TYPE_CHECKING:
    import httpx

public_only: ContextVar[bool] = ContextVar("public_only", default=False)
"""True in what a client of the network asked for: it must not make the daemon look into this machine or its network."""
LOOK_UP_LIMIT = 60.0  # seconds for one answer of a hub or index, from the request to its last byte
_LONGEST_PATIENCE = 86_400.0
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GZIP = 16 + zlib.MAX_WBITS


def new_client(
    origin: str,
    *,
    context: ssl.SSLContext | None = None,
    proxy: str | None = None,
    transport: "httpx.AsyncBaseTransport | None" = None,
    named: Collection[str] | None = None,
    by_client: bool = False,
) -> "httpx.AsyncClient":
    """Returns a client that connects to `origin` and, by redirects and links, to public addresses; to private ones only
    if the origin's own is private; never to link-local ones (metadata services of clouds). So a hub, or an attacker who
    controls it, cannot make the daemon talk to this machine's services. `named` are hosts (with a port, or for any
    port) that the configuration names; if it is given, only they may be private or without TLS besides the origin.
    `by_client` is True if a client chose the origin: where `public_only` is set, it must then be public, or named. The
    address is checked after the name was resolved, before anything is sent; the connections of a proxy are the proxy's
    to check. `proxy` replaces those of the environment. The first client takes 50 ms (the certificates)."""
    import httpx

    guard = _Guard(httpx.URL(origin), named, by_client)
    certificates = context or _default_certificates()
    return httpx.AsyncClient(
        verify=certificates,
        trust_env=False,
        follow_redirects=True,
        max_redirects=10,
        timeout=httpx.Timeout(30.0, connect=10.0),
        event_hooks={"request": [guard.check]},
        transport=transport or proxies.transport(certificates, proxy),
    )


@functools.cache
def _default_certificates() -> ssl.SSLContext:
    return trusted_certificates()


def trusted_certificates(file: str | None = None, *, besides: Path | None = None) -> ssl.SSLContext:
    """Returns a context that trusts this machine's certificates (SSL_CERT_FILE and SSL_CERT_DIR apply), certifi's and
    those in `besides`; or those in `file` alone. Raises `OSError`, also for a file without certificates."""
    import certifi

    context = ssl.create_default_context(cafile=file)
    if file is None:
        context.load_verify_locations(certifi.where())
    if besides is not None:
        context.load_verify_locations(besides)
    return context


class _Guard:
    """Checks each request of a client, and each connection that is made for it."""

    def __init__(self, origin: "httpx.URL", named: Collection[str] | None, by_client: bool) -> None:
        self._by_client = by_client
        self._origin = origin
        self._named = named
        address = literal(origin.host)
        self._inside = address is not None and not address.is_global
        self._connected = False

    async def check(self, request: "httpx.Request") -> None:
        """Checks a request. httpx calls it before every request, also after a redirect."""
        url = request.url
        if self._must_be_public(url):
            await _require_public(url.host)
        if not self._is_origin(url) and not self._is_named(url):
            if url.scheme != "https" and (self._origin.scheme == "https" or self._named is not None):
                raise SourceFailed(f"the source redirects to {url.host} without TLS; this is not followed")
            address = literal(url.host)
            if address is not None:
                self._require_allowed(url.host, address)
        request.extensions["trace"] = self._tracer(url)

    def _must_be_public(self, url: "httpx.URL") -> bool:
        return self._by_client and public_only.get() and not self._is_named(url)

    def _is_origin(self, url: "httpx.URL") -> bool:
        origin = self._origin
        return (url.scheme, url.host, url.port) == (origin.scheme, origin.host, origin.port)

    def _is_named(self, url: "httpx.URL") -> bool:
        return self._named is not None and (url.host in self._named or url.netloc.decode("ascii") in self._named)

    def _tracer(self, url: "httpx.URL") -> Callable[[str, dict[str, Any]], Awaitable[None]]:
        """Returns a function for httpcore's `trace` extension: it is called at each step of a connection, which it may
        stop by raising."""
        host, stream = "", None

        async def trace(event: str, info: dict[str, Any]) -> None:
            nonlocal host, stream
            if event == "connection.connect_tcp.started":
                host = str(info["host"])
            elif event == "connection.connect_tcp.complete":
                stream = info["return_value"]
                if host != url.raw_host.decode("ascii"):
                    return  # a proxy
                try:
                    self._check_peer(url, stream.get_extra_info("server_addr"))
                except (SourceFailed, Forbidden):
                    await stream.aclose()
                    raise
            elif event == "connection.start_tls.failed" and stream is not None:
                await stream.aclose()  # httpcore leaves it open if the handshake is cancelled

        return trace

    def _check_peer(self, url: "httpx.URL", peer: Any) -> None:
        address = _meant(ipaddress.ip_address(str(peer[0]).partition("%")[0]))
        if self._is_named(url):
            return
        if self._must_be_public(url) and not address.is_global:  # its name stood for another address before
            raise _not_public(url.host)
        if not self._is_origin(url) or (self._connected and not self._inside):
            self._require_allowed(url.host, address)
        else:
            self._connected, self._inside = True, not address.is_global

    def _require_allowed(self, host: str, address: Address) -> None:
        address = _meant(address)
        inside = self._inside and self._named is None
        if address.is_link_local or address.is_multicast or (not address.is_global and not inside):
            raise SourceFailed(f"the source redirects to {host}, which is not a public address; this is not followed")


async def _require_public(host: str) -> None:
    """Raises `Forbidden` unless `host` stands for public addresses alone. It asks the name server, and connects
    nowhere: an answer does not tell which ports are open. A name without an address is left to the connection."""
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return
    if not all(_meant(ipaddress.ip_address(str(at[4][0]).partition("%")[0])).is_global for at in addresses):
        raise _not_public(host)


def _not_public(host: str) -> Forbidden:
    return Forbidden(
        f"{host} is on this machine or in a private network, where no client over TCP may send the daemon: ask on the "
        f'Unix socket, or name it in config.toml with [registries."{host}"] (with its port)'
    )


def _meant(address: Address) -> Address:
    """Returns the IPv4 address that an IPv6 address embeds (RFC 4291, 3056, 6052), else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    translated = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
    return address.ipv4_mapped or address.sixtofour or translated or address


def refused_address(url: str, address: str, *, tls: bool) -> str:
    """Returns why the server at `url`, which the owner of the daemon names, may not be asked at this address; "" if it
    may. Its certificate keeps a name from standing for another server; without `tls` only this machine and private
    networks may be asked. Link-local addresses (metadata services of clouds) never are."""
    meant = _meant(ipaddress.ip_address(address.partition("%")[0]))
    if meant.is_link_local or meant.is_multicast or meant.is_unspecified:
        return f"{url} stands for {meant}, which is no address of a server: it got nothing"
    if not tls and meant.is_global:
        return f"{url} stands for {meant}, and would get requests without TLS over the internet: write https://"
    return ""


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """An answer. `headers` have their names in small letters; `url` is the address after redirects."""

    status: int
    url: str
    headers: Mapping[str, str]
    body: bytes


async def ask(
    client: "httpx.AsyncClient",
    url: str,
    headers: Mapping[str, str],
    *,
    limit: int,
    method: str = "GET",
    redirects: bool = True,
    seconds: float = LOOK_UP_LIMIT,
    content: bytes | None = None,
) -> HubAnswer:
    """Returns the answer to one request, whose body is `content`. It has at most `limit` bytes (also unpacked), and
    comes within `seconds`. Raises `SourceFailed` otherwise; the caller checks the status."""
    import httpx

    host = _host(url)
    sent = {**headers, "Accept-Encoding": "gzip"}
    try:
        async with (
            asyncio.timeout(seconds),
            client.stream(method, url, headers=sent, content=content, follow_redirects=redirects) as response,
        ):
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > limit:
                    raise SourceFailed(f"{host} answered with more than {limit} bytes, more than any list has")
            lowered = {name.lower(): value for name, value in response.headers.items()}
            unpacked = _unpacked(bytes(body), lowered.get("content-encoding", ""), limit, host)
            return HubAnswer(response.status_code, str(response.url), lowered, unpacked)
    except TimeoutError:
        raise SourceFailed(f"{host} did not answer within {seconds:.0f} s; try again later") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise SourceFailed(explain(error, url)) from error


def _unpacked(body: bytes, encoding: str, limit: int, host: str) -> bytes:
    if encoding in ("", "identity") or not body:
        return body
    if encoding not in ("gzip", "x-gzip"):
        raise SourceFailed(f"{host} answered in an encoding that was not requested ({encoding[:20]!r})")
    try:
        unpacked = zlib.decompressobj(_GZIP).decompress(body, limit + 1)
    except zlib.error:
        raise SourceFailed(f"{host} answered with damaged data; try again later") from None
    if len(unpacked) > limit:
        raise SourceFailed(f"{host} answered with more than {limit} bytes, more than any list has")
    return unpacked


def retry_after(text: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Returns the seconds of a Retry-After header with a number or a date (RFC 9110, section 10.2.3); at most a day.
    `now` is in Unix seconds."""
    if not text:
        return None
    if re.fullmatch(r"[0-9]+", text):
        return min(float(text[:20]), _LONGEST_PATIENCE)
    try:
        seconds = parsedate_to_datetime(text[:40]).timestamp() - now()
    except (ValueError, OverflowError):
        return None
    return min(max(seconds, 0.0), _LONGEST_PATIENCE)


def explain(error: BaseException, url: str) -> str:
    """Returns a sentence about a request that got no answer: the host, the failure, and a remedy."""
    import httpx

    host = _host(url)
    causes = list(_causes(error))
    for cause in causes:
        match cause:
            case socket.gaierror():
                return (
                    f"the name {host} cannot be resolved: check this machine's network and DNS, "
                    "or name a proxy in HTTPS_PROXY"
                )
            case ssl.SSLCertVerificationError():
                why = getattr(cause, "verify_message", "")
                return (
                    f"the certificate of {host} is not trusted ({why}): if a proxy inspects TLS here,"
                    " name its certificate in SSL_CERT_FILE"
                )
            case ssl.SSLError():
                why = getattr(cause, "reason", "")
                return f"TLS with {host} failed ({why}): check the address and the proxy"
            case ConnectionRefusedError():
                return f"{_via(url)} refuses the connection: check the address, the port, and that the server runs"
            case OSError() if cause.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN):
                return f"there is no network route to {_via(url)}: check this machine's network"
    match error:
        case httpx.ProxyError():
            return f"the proxy refused to connect to {host} ({str(error)[:80]}): check HTTPS_PROXY and its password"
        case httpx.TimeoutException():
            return f"{_via(url)} did not answer in time: check the network, or try again later"
        case httpx.TooManyRedirects():
            return f"{host} redirects in a circle"
        case httpx.ConnectError():
            return f"{_via(url)} cannot be reached: check this machine's network"
        case httpx.HTTPError():
            return f"{host} broke off its answer ({type(error).__name__})"
    return f"{host} redirects to an invalid address"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                yield from _causes(inner)
        error = error.__cause__ or error.__context__


def _via(url: str) -> str:
    """Returns the host, and the proxy through which it is asked."""
    import httpx

    proxy = proxies.named_for(httpx.URL(url))
    return f"the proxy {_host(proxy)} or, behind it, {_host(url)}" if proxy else _host(url)


def _host(url: str) -> str:
    """Returns host and port for messages, never a password."""
    import httpx

    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        return "the source"
    return parsed.host + (f":{parsed.port}" if parsed.port else "")
