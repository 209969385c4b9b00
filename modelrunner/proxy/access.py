"""Who may ask: the Host that a request names, and the Origin of the page that sends it. This is what keeps web pages,
and names rebound to loopback, away from a daemon on TCP."""

from collections.abc import Iterable
from typing import Self

from modelrunner.errors import Forbidden

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Access:
    """`hosts` are what a Host header may say on TCP, port included ("localhost:12434"). `origins` are the origins of
    web pages that may ask: exact ("https://chat.example"), with any port ("http://localhost:*"), or "*". `generation`
    grows when they change."""

    def __init__(self, hosts: Iterable[str], origins: Iterable[str] = ()) -> None:
        self.generation = 0
        self.allow(hosts, origins)

    def allow(self, hosts: Iterable[str], origins: Iterable[str]) -> None:
        """These from now on, and no others."""
        self.generation += 1
        self._hosts = frozenset(host.lower() for host in hosts)
        patterns = frozenset(origin.lower().rstrip("/") for origin in origins)
        self._any_origin = "*" in patterns
        self._origins = frozenset(p for p in patterns if not p.endswith(":*"))
        self._any_port = frozenset(p.removesuffix(":*") for p in patterns if p.endswith(":*"))

    @classmethod
    def for_listener(cls, port: int, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> Self:
        """For a listener on `port`: the loopback names, and `hosts`, each with its own port or this one."""
        return cls(host_names(port, hosts), origins)

    def check(self, host: str | None, origin: str | None, target_authority: str | None, *, local: bool) -> str | None:
        """The Origin to echo in Access-Control-Allow-Origin, if there is one. `target_authority` is the host in an
        absolute request URI; `local` is True on the Unix socket, where any Host is taken. Raises `Forbidden`."""
        if not local:
            self._check_host(host)
            if target_authority is not None:
                self._check_host(target_authority)
        if origin is None:
            return None
        if not self._allows(origin.lower(), host, local):
            raise Forbidden(f"pages from {origin[:200]!r} may not ask here; allow them with the setting `origins`")
        return origin

    def _check_host(self, host: str | None) -> None:
        if host is None or host.lower() not in self._hosts:
            raise Forbidden(f"{(host or '')[:200]!r} does not name this server; allow it with the setting `hosts`")

    def _allows(self, origin: str, host: str | None, local: bool) -> bool:
        if origin == "null":  # sandboxed frames and files: nobody in particular
            return False
        if self._any_origin or origin in self._origins:
            return True
        if not local and host is not None and origin == f"http://{host.lower()}":  # our own pages
            return True
        base, _, port = origin.rpartition(":")
        return origin in self._any_port or (port.isdecimal() and base in self._any_port)


def _has_port(host: str) -> bool:
    return host.rpartition(":")[2].isdecimal() and (host.startswith("[") or host.count(":") == 1)


def host_names(port: int, hosts: Iterable[str]) -> list[str]:
    """What a Host header may say to a listener on `port`."""
    named = [host if _has_port(host) else f"{host}:{port}" for host in (*LOOPBACK_NAMES, *hosts)]
    if port == 80:  # a client leaves the default port out
        named += [host.removesuffix(":80") for host in named]
    return named
