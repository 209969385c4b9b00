"""Checks the Host and the Origin of a request. This keeps web pages, and names that were rebound to loopback, away from
a daemon on TCP."""

import re
from collections.abc import Iterable

from modelrunner.errors import Forbidden

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
LOCAL = "local"
"""The origin that stands for pages on this machine's ports, and for apps that show files of their own."""
_LOCAL_ORIGINS = (
    *(f"{scheme}://{name}:*" for scheme in ("http", "https") for name in LOOPBACK_NAMES),
    *("app://", "file://", "tauri://", "vscode-webview://"),
)


class Access:
    """`hosts` are the allowed values of a Host header on TCP, port included ("localhost:12434"). `origins` are the
    allowed origins: exact ("https://chat.example", "null"), with any port ("http://localhost:*"), with any name
    ("https://*.example", "chrome-extension://*"), all of a scheme ("app://"), "local" (`_LOCAL_ORIGINS`), or "*" for
    all but "null". At the end of a host or an origin, `:*` means any port or none. `generation` grows with each change
    of hosts, origins or keys."""

    def __init__(self, hosts: Iterable[str], origins: Iterable[str] = ()) -> None:
        self.generation = 0
        self.allow(hosts, origins)

    def allow(self, hosts: Iterable[str], origins: Iterable[str]) -> None:
        """Replaces both lists."""
        self.generation += 1
        self._hosts = _matching(host.lower() for host in hosts)
        origins = [allowed for origin in origins for allowed in (_LOCAL_ORIGINS if origin == LOCAL else (origin,))]
        self._origins = _matching(f"{origin}*" if origin.endswith("://") else origin.rstrip("/") for origin in origins)

    def renew(self) -> None:
        """Invalidates every head that was checked before: the API keys changed."""
        self.generation += 1

    def check(self, host: str | None, origin: str | None, target_authority: str | None, *, local: bool) -> str | None:
        """Returns the Origin to echo in Access-Control-Allow-Origin, None without one. `target_authority` is the host
        in an absolute request URI; `local` is True on the Unix socket, where any Host is allowed. Raises
        `Forbidden`."""
        if not local:
            self._check_host(host)
            if target_authority is not None:
                self._check_host(target_authority)
        if origin is None:
            return None
        if not self._allows(origin.lower(), host, local):
            raise Forbidden(
                f"web pages from {origin[:200]!r} are not allowed; allow them with origins = [{_quoted(origin)}]"
            )
        return origin

    def _check_host(self, host: str | None) -> None:
        if host is None or not self._hosts.fullmatch(host.lower()):
            name = (host or "").rpartition(":")[0] if _has_port(host or "") else host or ""
            allowed = _quoted(f"{name[:190]}:*")  # a tunnel or a proxy changes the port, or leaves it out
            raise Forbidden(f"{(host or '')[:200]!r} does not name this server; allow it with hosts = [{allowed}]")

    def _allows(self, origin: str, host: str | None, local: bool) -> bool:
        if self._origins.fullmatch(origin):
            return True
        scheme, _, page = origin.partition("://")  # the daemon's own pages
        return not local and host is not None and page == host.lower() and scheme in ("http", "https")


def _matching(patterns: Iterable[str]) -> re.Pattern[str]:
    """Compiles an expression that matches, in lower case, every text that one of the patterns matches."""
    return re.compile("|".join(map(_expression, patterns)) or r"(?!)")


def _expression(pattern: str) -> str:
    if pattern == "*":
        return r".*://.*"  # not "null", which stands for local files and sandboxed frames of any page
    name, port = (pattern[:-2], r"(?::[0-9]+)?") if pattern.endswith(":*") else (pattern, "")
    # A Host has no scheme: a star in it would allow pages of any name that was rebound to loopback.
    return re.escape(name.lower()).replace(r"\*", r"[^/:]*" if "://" in name else r"\*") + port


def _quoted(text: str) -> str:
    return f'"{text[:200]}"'


def _has_port(host: str) -> bool:
    port = host.rpartition(":")[2]
    return (port == "*" or port.isdecimal()) and (host.startswith("[") or host.count(":") == 1)


def host_names(port: int, hosts: Iterable[str]) -> list[str]:
    """Returns the allowed values of a Host header for a listener on `port`: the loopback names with any port, since
    tunnels and proxies change it and no name that was rebound to loopback is one of them, and `hosts`, each with its
    own port or with this one."""
    named = [host if _has_port(host) else f"{host}:{port}" for host in hosts]
    if port in (80, 443):  # a client omits the default port
        named += [host.removesuffix(f":{port}") for host in named]
    return [*(f"{name}:*" for name in LOOPBACK_NAMES), *named]
