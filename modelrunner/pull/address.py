"""`https://HOST/PATH.gguf#sha256=HEX`: a GGUF file at an address. The fragment with the sha256 is that of PEP 503.

The digest alone says what the file must contain, so an address without one is refused.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

from modelrunner import __version__
from modelrunner.concurrency.threads import in_thread
from modelrunner.errors import InvalidReference, ModelNotFound, ModelRunnerError, SourceFailed
from modelrunner.progress import WorkProgress
from modelrunner.pull.fetching import fetch_files
from modelrunner.pull.remoteheader import preview_gguf
from modelrunner.pull.source import Context, FetchResult, Preview, PullSpec, Source
from modelrunner.store.references import Reference
from modelrunner.web.attempt import refused
from modelrunner.web.download import Downloader
from modelrunner.web.partial import RemoteFile
from modelrunner.web.proxies import is_loopback
from modelrunner.web.session import LOOK_UP_LIMIT, HubAnswer, ask, new_client, retry_after

if TYPE_CHECKING:
    import httpx

_FRAGMENT = re.compile(r"sha256=(?P<hex>[0-9a-fA-F]{64})")
_CONTENT_RANGE = re.compile(r"bytes 0-0/([0-9]{1,18})")
_HOW = "write https://HOST/PATH.gguf#sha256=HEX, or give `--sha256 HEX`"


@dataclass(frozen=True, slots=True)
class Address:
    """`url` has no fragment; `sha256` is in hex."""

    url: str
    sha256: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses an address. Raises `InvalidReference`."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise InvalidReference(f"this is not an address: {_HOW}", param="model") from None
        place = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"[:200]
        if "@" in parts.netloc or parts.query:  # these may be secrets, so the message does not repeat them
            raise InvalidReference(
                f"{place}: every list of models would show the password or query of this address; leave it out, or"
                " download the file yourself and take it with `modelrunner package --gguf FILE NAME`",
                param="model",
            )
        match = _FRAGMENT.fullmatch(parts.fragment)
        if match is None:
            raise InvalidReference(
                f"{place}: the sha256 of its file is missing, so the downloaded file could not be compared with the"
                f" published one: {_HOW}",
                param="model",
            )
        if parts.scheme == "http" and not is_loopback(host):
            raise InvalidReference(f"{place}: an address without TLS must be on this machine", param="model")
        if not parts.path.lower().endswith(".gguf"):
            raise InvalidReference(f"{place}: an address must be that of a GGUF file: {_HOW}", param="model")
        return cls(text.partition("#")[0], match["hex"].lower())

    def __str__(self) -> str:
        return f"{self.url}#sha256={self.sha256}"

    @property
    def file(self) -> str:
        return unquote(self.url.rpartition("/")[2])

    @property
    def name(self) -> Reference:
        """Returns the host and the path without `.gguf`, in the characters that a name may have. Raises
        `InvalidReference`."""
        parts = urlsplit(self.url)
        path = unquote(parts.path)[: -len(".gguf")].lower()
        words = [re.sub("[^a-z0-9]+", _joint, word).strip("._-") for word in path.split("/")]
        with contextlib.suppress(InvalidReference):
            name = Reference.parse_name("/".join([parts.netloc.lower(), *filter(None, words)]))
            if name.host == parts.netloc.lower():
                return name
        raise InvalidReference(f"{self.url[:200]} cannot be made a name: give one with `--name`", param="name")


def _joint(match: re.Match[str]) -> str:
    """Returns the text that replaces characters between letters and digits in a name."""
    return match[0] if match[0] in (".", "_", "-") else "-"


class AddressSource(Source):
    """Models at addresses. `pause` waits between attempts."""

    def __init__(self, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._pause = pause

    def claims(self, text: str) -> bool:
        return text.lower().startswith(("https://", "http://"))

    def name(self, text: str) -> Reference:
        return Address.parse(text).name

    def normal(self, text: str) -> str:
        return str(Address.parse(text))

    async def revision(self, wanted: PullSpec) -> str | None:
        """Returns the digest: an address with a digest never means other content."""
        return Address.parse(wanted.text).sha256

    async def preview(self, text: str, folder: Path, token: str | None) -> Preview:
        address = Address.parse(text)
        async with await self._client(address) as client:
            file = await self._file(client, address, _headers(token))

            async def part(range: str, limit: int) -> HubAnswer:
                headers = {**_headers(token), "Range": range}
                return await ask(client, file.url, headers, limit=limit, seconds=LOOK_UP_LIMIT)

            bundle = await preview_gguf(file, part, address.name.short, folder)
        return Preview(file.size, bundle, files={file.name: file.size}, version=f"sha256:{address.sha256}")

    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        address = Address.parse(wanted.text)
        names = {"model.gguf": address.sha256}
        result = FetchResult({}, names, names, revision=address.sha256, version=f"sha256:{address.sha256}")
        if await context.stored(address.sha256):
            return result
        context.report(WorkProgress(f"Looking up {address.url}", "resolving"))
        async with await self._client(address) as client:
            file = await self._file(client, address, _headers(wanted.token))
            downloader = Downloader(client, _headers(wanted.token), pause=self._pause)
            if await fetch_files({"model.gguf": file}, context, downloader, late=lambda _: False, check=_no_check):
                return result  # another pull has stored it meanwhile
            paths = {"model.gguf": context.partial(file)}
            return FetchResult(paths, names, revision=address.sha256, version=result.version)

    async def _file(self, client: "httpx.AsyncClient", address: Address, headers: dict[str, str]) -> RemoteFile:
        """Asks for the size. A server without HEAD is asked for the first byte."""
        answer = await ask(client, address.url, headers, limit=0, method="HEAD", seconds=LOOK_UP_LIMIT)
        size = answer.headers.get("content-length", "") if answer.status == 200 else ""
        if not size and answer.status in (200, 405, 501):
            answer = await ask(client, address.url, {**headers, "Range": "bytes=0-0"}, limit=1, seconds=LOOK_UP_LIMIT)
            match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
            size = match[1] if answer.status == 206 and match else ""
        if not re.fullmatch("[0-9]{1,18}", size):
            raise _failure(address, answer)
        return RemoteFile(address.file, address.url, int(size), address.sha256)

    async def _client(self, address: Address) -> "httpx.AsyncClient":
        return await in_thread(lambda _: new_client(address.url, by_client=True))


def _headers(token: str | None) -> dict[str, str]:
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    return {"User-Agent": f"modelrunner/{__version__}", **authorization}


def _failure(address: Address, answer: HubAnswer) -> ModelRunnerError:
    match answer.status:
        case 404 | 410:
            return ModelNotFound(f"{address.url} is not there: check the address")
        case 401 | 403:
            return refused(address.url, answer.headers)
        case 429 | 503 as status:
            wait = retry_after(answer.headers.get("retry-after"))
            return SourceFailed(f"{address.url}: the server answered {status}; pull again later", retry_after=wait)
        case status:
            return SourceFailed(f"{address.url}: the server does not say how large the file is (status {status})")


async def _no_check() -> None:
    """A GGUF file carries no code."""
