"""Model references: the typed text, its normal form, and the shortest form that means the same.

[host[:port]/]path[:tag][@digest]     the grammar and lengths of OCI's distribution specification
hf.co/ORG/REPO[:QUANT][@REVISION]     a repository on the Hugging Face hub, at a branch, a tag or a commit
modelscope.cn/ORG/REPO[...]           a repository on ModelScope, in the same form
pypi:NAME[==VERSION]                  a model inside a Python package
"""

import re
from typing import Self

import msgspec

from modelrunner.errors import InvalidReference
from modelrunner.store.digests import Digest

DEFAULT_HOST, DEFAULT_ORGANISATION, DEFAULT_TAG = "docker.io", "ai", "latest"
HUB = "hf.co"
MODELSCOPE = "modelscope.cn"
PYPI = "pypi"
NO_REGISTRIES = frozenset({HUB, MODELSCOPE, PYPI})
"""The hosts of references that other sources than OCI registries serve."""
_ALIASES = {"index.docker.io": DEFAULT_HOST, "huggingface.co": HUB, "www.huggingface.co": HUB}
_ALIASES |= {"www.modelscope.cn": MODELSCOPE}
_MAIN_BRANCHES = {HUB: "main", MODELSCOPE: "master"}
# One of these as a plain name with a tag would read as a scheme or a digest.
_SCHEMES = frozenset({PYPI, "sha256", "file"})
_LONGEST_NAME = 255
_PASTED = re.compile(
    r"https?://(?P<repository>(?:www\.)?(?:huggingface\.co|hf\.co)/[^/?#:]+/[^/?#:]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+)(?:/(?:[^?#]*/)?(?P<file>[^/?#]*))?)?/?(?:\?[^#]*)?(?:#(?!sha256=).*)?",
    re.I,
)

_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-f:.]{{2,45}}\])(?::[0-9]{{1,5}})?")
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_HUB_COMPONENT = re.compile(r"[a-z0-9_](?:[a-z0-9_-]|\.(?!\.)){0,95}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PACKAGE = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,98}[a-z0-9])?")
_VERSION = re.compile(r"[a-z0-9](?:[a-z0-9.!+_-]{0,62}[a-z0-9])?")


class Reference(msgspec.Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """`host` is `pypi` for packages, whose `path` is the package and whose `tag` is the version, "" for any. `revision`
    is a branch, tag or commit of a hub, "" for its main branch. Two texts that mean the same model give equal
    references; `str()` is the normal form."""

    host: str
    path: str
    tag: str
    digest: Digest | None = None
    revision: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a reference. Raises `InvalidReference`. The message never depends on which models exist."""
        if len(text) > 2 * _LONGEST_NAME + 128:
            raise _invalid(text, "it is too long")
        text = unpasted(text)
        if text.lower().startswith(f"{PYPI}:"):
            return cls._package(text)
        rest, at, behind = text.partition("@")
        revision = ""
        name, tag = _split_tag(rest)
        host, path = _split_host(name.lower())
        if host in _MAIN_BRANCHES:
            _check_all(text, _HUB_COMPONENT, path.split("/"), f"{host}/ORG/REPO[:QUANT]", count=2)
            tag = DEFAULT_TAG if tag.lower() == DEFAULT_TAG else tag.upper()
            if at and not behind.lower().startswith("sha256:"):
                if not _REVISION.fullmatch(behind):
                    raise _invalid(text, f"write it as {host}/ORG/REPO[:QUANT][@REVISION]")
                revision, at = "" if behind == _MAIN_BRANCHES[host] else behind, ""
        else:
            _check_all(text, _COMPONENT, path.split("/"), "[host/]name[:tag]")
        if not _HOST.fullmatch(host) or len(host) + len(path) >= _LONGEST_NAME:
            raise _invalid(text, "write it as [host/]name[:tag]")
        if (":" in rest and rest.partition(":")[0].lower() in _SCHEMES) or (tag and not _TAG.fullmatch(tag)):
            raise _invalid(text, "write it as [host/]name[:tag]")
        return cls(host, path, tag or DEFAULT_TAG, Digest.parse(behind) if at else None, revision)

    @classmethod
    def parse_name(cls, text: str) -> Self:
        """Parses a name for a model: a reference without a digest. Raises `InvalidReference`."""
        reference = cls.parse(text)
        if reference.digest:
            raise InvalidReference(f"{text!r} cannot be given as a name: leave the digest out", param="tag")
        return reference

    @classmethod
    def _package(cls, text: str) -> Self:
        name, equals, version = text[len(PYPI) + 1 :].lower().partition("==")
        if not _PACKAGE.fullmatch(name) or (equals and not _VERSION.fullmatch(version)):
            raise _invalid(text, "write it as pypi:NAME or pypi:NAME==VERSION")
        return cls(PYPI, re.sub(r"[-_.]+", "-", name), version)  # PEP 503's normal form

    @property
    def name(self) -> str:
        """Returns the name without tag or version."""
        return f"{PYPI}:{self.path}" if self.host == PYPI else f"{self.host}/{self.path}"

    def __str__(self) -> str:
        return self._with_tag(self.name) + self._behind

    def _with_tag(self, name: str) -> str:
        separator = "==" if self.host == PYPI else ":"
        return f"{name}{separator}{self.tag}" if self.tag else name

    @property
    def short(self) -> str:
        """Returns the shortest text that `parse` turns into this reference."""
        name = self.path if self.host == DEFAULT_HOST else self.name
        if self.host == DEFAULT_HOST and self.path.startswith(f"{DEFAULT_ORGANISATION}/"):
            plain = self.path.removeprefix(f"{DEFAULT_ORGANISATION}/")
            name = self.path if "/" in plain or plain in _SCHEMES else plain
        if self.host == DEFAULT_HOST and _looks_like_host(name):
            name = self.name
        text = name if self.tag == DEFAULT_TAG and self.host != PYPI else self._with_tag(name)
        return text + self._behind

    @property
    def _behind(self) -> str:
        behind = self.digest or self.revision
        return f"@{behind}" if behind else ""


def split_part(part: str) -> tuple[str, str]:
    """Returns the name and the tag, in lower case and "" for any, of a text that may be a part of a reference."""
    part = part.lower()
    if "==" in part:
        name, _, tag = part.partition("==")
        return name, tag
    return (part, "") if part.startswith(f"{PYPI}:") else _split_tag(part)


def unpasted(text: str) -> str:
    """Returns the reference for the address of a page on the Hugging Face hub; any other text unchanged."""
    match = _PASTED.fullmatch(text)
    if match is None:
        return text
    stem, dot, suffix = (match["file"] or "").rpartition(".")
    reference = f"{match['repository']}:{stem}" if dot and suffix.lower() == "gguf" else match["repository"]
    return reference if match["revision"] in (None, _MAIN_BRANCHES[HUB]) else f"{reference}@{match['revision']}"


def how_to_get(reference: Reference) -> str:
    """Returns the end of a sentence about a model that is not here."""
    return f"`modelrunner pull {reference.short}` gets it, `modelrunner list` shows what is here"


def _split_tag(text: str) -> tuple[str, str]:
    """Splits the text at its tag. A colon after the last slash begins the tag; one before it belongs to the port."""
    colon = text.rfind(":")
    if colon <= text.rfind("/"):
        return text, ""
    # The tag's grammar refuses a colon with nothing after it.
    return text[:colon], text[colon + 1 :] or ":"


def _looks_like_host(name: str) -> bool:
    first, slash, _ = name.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")


def _split_host(name: str) -> tuple[str, str]:
    if not _looks_like_host(name):
        host, path = DEFAULT_HOST, name
    else:
        first, _, path = name.partition("/")
        host = _ALIASES.get(first, first)
    if host == DEFAULT_HOST and "/" not in path:
        path = f"{DEFAULT_ORGANISATION}/{path}"
    return host, path


def _check_all(text: str, form: re.Pattern[str], components: list[str], usage: str, count: int = 0) -> None:
    if (count and len(components) != count) or not all(form.fullmatch(component) for component in components):
        raise _invalid(text, f"write it as {usage}")


def _invalid(text: str, why: str) -> InvalidReference:
    shown = text if len(text) <= 80 else text[:77] + "..."
    if text.lower().endswith(".gguf") and text.startswith((".", "/", "~")):
        why = f"a file must be given a name first: `modelrunner package --gguf {shown} NAME`"
    elif "://" in text:
        why = "an address is not a name; write hf.co/ORG/REPO for a model on Hugging Face, pypi:NAME for a package"
    return InvalidReference(f"{shown!r} is not a model reference: {why}", param="model")
