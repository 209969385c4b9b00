"""Users and passwords of registries, in docker's file format: our own file first, then docker's.

The format and the protocol of the helpers: https://docs.docker.com/reference/cli/docker/login/#credential-helpers. A
helper is asked only where docker's file, which is the user's, names it.
"""

import asyncio
import base64
import binascii
import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from modelrunner import durable
from modelrunner.errors import NotFound, SourceFailed, StorageFailed
from modelrunner.oci.registries import HUB

_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PATIENCE = 30.0  # seconds for a helper
_LARGEST = 1 << 20
_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", HUB, "registry-1.docker.io")
_TOKEN_USER = "<token>"  # the user that helpers return with a refresh token


@dataclass(frozen=True, slots=True)
class Credential:
    """`user` and `password`, or a `refresh` token that a token service takes in their place."""

    user: str = ""
    password: str = field(default="", repr=False)
    refresh: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """Returns the value of an Authorization header (RFC 7617)."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class _LoginFile(msgspec.Struct):
    auths: dict[str, dict[str, Any]] = {}
    helpers: dict[str, str] = msgspec.field(default_factory=dict, name="credHelpers")
    store: str = msgspec.field(default="", name="credsStore")


class Credentials:
    """Finds and keeps credentials. `own` is modelrunner's file; `files` are read after it, if they exist."""

    def __init__(self, own: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._own = own
        self._environ = environ

    async def find(self, host: str) -> Credential | None:
        """Returns the credentials for a registry, None without any. Raises `SourceFailed` for a helper that does not
        answer."""
        for path in (self._own, self._dockers()):
            file = _read(path)
            for key in _keys(host):
                helper = file.helpers.get(key)
                if helper and (credential := await self._ask(helper, key)):
                    return credential
            for key, entry in file.auths.items():
                if _is_key_of(key, host) and (credential := _decoded(entry)):
                    return credential
            if file.store:
                for key in _keys(host)[:1]:
                    if credential := await self._ask(file.store, key):
                        return credential
        return None

    def store(self, host: str, credential: Credential) -> None:
        """Keeps the credential in modelrunner's file, which only its owner can read. Raises `StorageFailed`."""
        auth = base64.b64encode(f"{credential.user}:{credential.password}".encode()).decode()
        with self._changing() as table:
            auths = table.setdefault("auths", {})
            for key in [key for key in auths if _is_key_of(key, host)]:
                del auths[key]
            auths[_keys(host)[0]] = {"auth": auth}

    def forget(self, host: str) -> None:
        """Removes the registry from modelrunner's file. Raises `NotFound` if the file lacks it, and `StorageFailed`."""
        with self._changing() as table:
            auths = table.get("auths", {})
            known = [key for key in auths if _is_key_of(key, host)]
            if not known:
                raise NotFound(f"there is no login for {host} here")
            for key in known:
                del auths[key]

    def _dockers(self) -> Path:
        """Returns the path of docker's file, which docker's own programs read through links as well."""
        folder = self._environ.get("DOCKER_CONFIG") or "~/.docker"
        return Path(os.path.realpath(os.path.expanduser(folder) + "/config.json"))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """Yields the content of the file and writes it back. A lock keeps two logins at once from losing each other's
        change."""
        with durable.translated("storing the login", self._own.parent):
            self._own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self._own.with_suffix(".lock"), "a", opener=durable.open_ours) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    table = msgspec.json.decode(durable.read(self._own, _LARGEST), type=dict[str, Any])
                except FileNotFoundError:
                    table = {}
                except msgspec.MsgspecError:
                    raise StorageFailed(f"{self._own} is damaged: remove it, and log in again") from None
                yield table
                durable.write(self._own, msgspec.json.format(msgspec.json.encode(table), indent=1))

    async def _ask(self, helper: str, key: str) -> Credential | None:
        """Asks `docker-credential-HELPER` on the PATH. Returns None if the helper has no credential, or is not
        installed."""
        if not _HELPER.fullmatch(helper):
            raise SourceFailed("docker's configuration has an invalid credential helper name")
        try:
            process = await asyncio.create_subprocess_exec(
                *(f"docker-credential-{helper}", "get"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=dict(self._environ),
            )
        except OSError:
            return None
        try:
            async with asyncio.timeout(_PATIENCE):
                output, _ = await process.communicate(key.encode())
        except TimeoutError:
            raise SourceFailed(f"docker-credential-{helper} does not answer: run it by hand to see why") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            return None
        try:
            answer = msgspec.json.decode(output[:_LARGEST], type=dict[str, str])
        except msgspec.MsgspecError:
            raise SourceFailed(
                f"docker-credential-{helper} gave an answer that cannot be read: run it by hand to see why"
            ) from None
        user, secret = answer.get("Username", ""), answer.get("Secret", "")
        if user == _TOKEN_USER:
            return Credential(refresh=secret)
        return Credential(user, secret) if user or secret else None


def _read(path: Path) -> _LoginFile:
    """Returns an empty value if the file is missing or cannot be parsed: a pull may need no login."""
    try:
        return msgspec.json.decode(durable.read(path, _LARGEST), type=_LoginFile)
    except (OSError, msgspec.MsgspecError):
        return _LoginFile()


def _keys(host: str) -> Sequence[str]:
    """Returns the keys under which the file may have the registry; we write the first."""
    return _HUB_KEYS if host == HUB else (host, f"https://{host}", f"https://{host}/v2/", f"https://{host}/v1/")


def _is_key_of(key: str, host: str) -> bool:
    """Returns whether a key stands for the registry `host`: the scheme and the path of a key have no meaning."""
    bare = key.split("://")[-1].split("/")[0].lower()
    return bare in {name.split("://")[-1].split("/")[0] for name in _keys(host)}


def _decoded(entry: Mapping[str, Any]) -> Credential | None:
    if isinstance(refresh := entry.get("identitytoken"), str) and refresh:
        return Credential(refresh=refresh)
    if isinstance(user := entry.get("username"), str) and isinstance(password := entry.get("password"), str):
        return Credential(user, password)
    try:
        user, colon, password = base64.b64decode(str(entry.get("auth", "")), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return Credential(user, password.rstrip("\0")) if colon else None
