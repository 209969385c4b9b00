"""Asks the package indexes that pip is configured for.

pip is asked for its settings only (its environment variables, its files and its default index apply). Our own HTTP
client reads pages and wheels, so that downloads resume and their sizes are known in advance. Passwords come from an
index's address and from ~/.netrc, as for pip; a keyring is not asked.
"""

import asyncio
import contextlib
import json
import netrc
import re
import ssl
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import url2pathname

from modelrunner.concurrency.threads import in_thread
from modelrunner.errors import SourceFailed
from modelrunner.pull.simple import ACCEPT, Link, links_in
from modelrunner.web.download import Downloader
from modelrunner.web.partial import RemoteFile
from modelrunner.web.session import LOOK_UP_LIMIT, ask, explain, new_client, trusted_certificates

if TYPE_CHECKING:
    import httpx

_LONGEST_PAGE = 16 << 20
_SETTINGS_LIMIT = 60.0
# Prints the options that pip makes of its files, its environment and its defaults; no pip command prints them.
_SCRIPT = """
import json
from pip._internal.commands import create_command
options, _ = create_command("download").parse_args(["--no-input"])
names = "index_url extra_index_urls no_index find_links cert client_cert proxy trusted_hosts".split()
print(json.dumps({name: getattr(options, name) for name in names}))
"""


@dataclass(frozen=True, slots=True)
class PipSettings:
    """pip's options of the same names. `indexes` are the addresses of simple indexes; both lists may hold `file:`
    addresses, and `find_links` paths."""

    indexes: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()


async def pip_settings(environ: Mapping[str, str]) -> PipSettings:
    """Asks the pip of this Python, in a process of its own. Raises `SourceFailed`."""
    pip = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _SCRIPT),
        env=dict(environ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_SETTINGS_LIMIT):
            output, errors = await pip.communicate()
        report = json.loads(output)
    except TimeoutError:
        raise SourceFailed("pip did not report its settings in time: check `pip config list`") from None
    except ValueError:
        last = (errors.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise SourceFailed(f"pip cannot report its settings ({last[:200]}): check `pip config list`") from None
    finally:
        if pip.returncode is None:
            pip.kill()
            await pip.wait()
    indexes = () if report["no_index"] else (report["index_url"], *report["extra_index_urls"])
    return PipSettings(
        tuple(filter(None, indexes)),
        tuple(report["find_links"]),
        report["cert"],
        report["client_cert"],
        report["proxy"] or None,
        tuple(report["trusted_hosts"]),
    )


class Indexes:
    """All indexes and folders of the settings together, as pip uses them. A context manager."""

    def __init__(self, settings: PipSettings, *, pause: Callable[[float], Awaitable[None]]) -> None:
        self._settings = settings
        self._pause = pause
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._origins = [_origin(url) for url in (*settings.indexes, *settings.find_links) if _is_remote(url)]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def links(self, name: str) -> list[tuple[Link, str]]:
        """Returns every file of the package `name` (PEP 503's normal form), each with the address of the index that
        offers it. An index that fails is skipped if another has the package; otherwise raises its `SourceFailed`."""
        links: list[tuple[Link, str]] = []
        failure: SourceFailed | None = None
        pages = [f"{index.rstrip('/')}/{name}/" for index in self._settings.indexes]
        for page in (*pages, *self._settings.find_links):
            try:
                links += [(link, page) for link in await self._page(page)]
            except SourceFailed as error:
                failure = failure or error
        if failure is not None and not any(_belongs(link.file, name) for link, _ in links):
            raise failure
        return links

    async def remote(self, link: Link, page: str) -> RemoteFile | Path:
        """Returns the file to download, or its path if it lies on this machine. Raises `SourceFailed`."""
        if not _is_remote(link.url):
            path = None if _is_remote(page) else _local(link.url)
            if path is None:
                raise SourceFailed(f"the package index {_host(page)} names a file without an HTTP address: {link.file}")
            return path
        size = link.size if link.size is not None else await self._size(link, page)
        return RemoteFile(link.file, _bare(link.url), size, link.sha256)

    async def download(self, link: Link, page: str) -> Downloader:
        """Returns the downloader for the files that `page` offers."""
        client, credentials = await self._client(page), self._credentials(link.url)
        return Downloader(client, credentials, pause=self._pause)

    async def _size(self, link: Link, page: str) -> int:
        """Returns the size of a file whose index does not give it, from the headers of its answer; the body is not
        read."""
        import httpx

        client = await self._client(page)
        headers = {**self._credentials(link.url), "Accept-Encoding": "identity"}
        try:
            async with (
                asyncio.timeout(LOOK_UP_LIMIT),
                client.stream("GET", _bare(link.url), headers=headers) as response,
            ):
                length = response.headers.get("Content-Length", "")
                if response.status_code == 200 and re.fullmatch("[0-9]{1,17}", length):
                    return int(length)
                raise SourceFailed(f"{link.file}: the index gives neither its size nor its address; check the index")
        except TimeoutError:
            raise SourceFailed(f"{link.file}: the index did not answer within {LOOK_UP_LIMIT:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise SourceFailed(f"{link.file} cannot be fetched: {explain(error, link.url)}") from error

    async def _page(self, address: str) -> list[Link]:
        path = _local(address)
        if path is not None:
            return await in_thread(lambda _: _links_of_folder(path))
        headers = {**self._credentials(address), "Accept": ACCEPT}
        answer = await ask(
            await self._client(address), _bare(address), headers, limit=_LONGEST_PAGE, seconds=LOOK_UP_LIMIT
        )
        match answer.status:
            case 200:
                return await in_thread(
                    lambda _: links_in(answer.body, answer.headers.get("content-type", ""), answer.url)
                )
            case 404 | 410:
                return []
            case 401 | 403 as status:
                raise SourceFailed(
                    f"the package index {_host(address)} refuses access ({status}): put the user and password into its"
                    " address in pip's configuration, or into ~/.netrc"
                )
            case status:
                raise SourceFailed(f"the package index {_host(address)} answered {status}; try again later")

    async def _client(self, page: str) -> "httpx.AsyncClient":
        origin = _origin(page)
        if origin not in self._clients:
            settings, host = self._settings, urlsplit(page)

            def made(_: object) -> "httpx.AsyncClient":
                trusted = {host.hostname, host.netloc.rpartition("@")[2]} & set(settings.trusted_hosts)
                return new_client(origin, context=_certificates(settings, bool(trusted)), proxy=settings.proxy)

            self._clients[origin] = await in_thread(made)
        return self._clients[origin]

    def _credentials(self, url: str) -> dict[str, str]:
        """Returns the header for the index's own files: its password is not sent to the hosts that it links to."""
        for address in (url, *self._settings.indexes, *self._settings.find_links):
            parts = urlsplit(address)
            if parts.username is not None and _origin(address) == _origin(url):
                return _basic(unquote(parts.username), unquote(parts.password or ""))
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if _origin(url) in self._origins and (login := netrc.netrc().hosts.get(urlsplit(url).hostname or "")):
                return _basic(login[0], login[2])
        return {}


def _basic(user: str, password: str) -> dict[str, str]:
    import httpx

    request = next(httpx.BasicAuth(user, password).auth_flow(httpx.Request("GET", "http://localhost")))
    return {"Authorization": request.headers["Authorization"]}


def _certificates(settings: PipSettings, trusted: bool) -> ssl.SSLContext | None:
    """Returns the TLS context of the settings; None for the default one. Raises `SourceFailed` for a file that cannot
    be read."""
    if not (settings.cert or settings.client_cert or trusted):
        return None
    try:
        context = trusted_certificates(settings.cert)
        if settings.client_cert:
            context.load_cert_chain(settings.client_cert)
    except OSError as error:
        which = settings.client_cert or settings.cert
        raise SourceFailed(f"pip's certificate file {which} cannot be used: {error.strerror or error}") from None
    if trusted:  # pip's trusted-host: its certificate is not checked
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _links_of_folder(path: Path) -> list[Link]:
    """Returns the links of an index or folder on this machine: those of its page, or its files; for a page, its
    links."""
    page = path / "index.html" if (path / "index.html").is_file() else path
    if page.is_file() and page.suffix in (".html", ".htm"):
        base = page.parent.as_uri() + "/" if page != path else page.as_uri()
        return links_in(page.read_bytes()[:_LONGEST_PAGE], "text/html", base)
    return [Link(file.name, file.as_uri()) for file in sorted(path.iterdir())] if path.is_dir() else []


def _local(address: str) -> Path | None:
    parts = urlsplit(address)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return None if _is_remote(address) else Path(address).expanduser().absolute()


def _is_remote(address: str) -> bool:
    return urlsplit(address).scheme in ("http", "https")


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _bare(url: str) -> str:
    """Returns the address without its password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


def _belongs(file: str, name: str) -> bool:
    return re.sub(r"[-_.]+", "-", file).lower().startswith(f"{name}-")
