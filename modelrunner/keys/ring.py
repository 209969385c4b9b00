"""The API keys of this daemon, which are stored as digests: making, finding and revoking them."""

import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import msgspec

from modelrunner.durable import translated
from modelrunner.errors import BadRequest, Conflict, Forbidden, KeyNotFound, Unauthorized
from modelrunner.jsonfile import JsonFile
from modelrunner.keys.allowances import Allowance, Rates
from modelrunner.types import RequestLimits

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PREFIX = "mr-"
_LONGEST = 36500 * 86400.0  # seconds until a key expires


class Scope(StrEnum):
    """The rights of a key: to ask models, to change the stored models, or to do everything with the daemon."""

    INFERENCE = "inference"
    MODELS = "models"
    ADMIN = "admin"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its text. `models` are patterns of model names with `*`, () for all models. The limits are None for
    no limit: of requests and tokens in any 60 seconds, of requests at the same time, and of each request
    (`RequestLimits`). The requests of a `batch` key let others go first. `created` and `expires` are in Unix seconds.
    `id` stays when the text changes; a later key of the same name has another ID."""

    name: str
    id: str = ""
    digest: str
    scopes: tuple[Scope, ...] = (Scope.INFERENCE,)
    models: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    max_tokens: int | None = None
    max_seconds: float | None = None
    batch: bool = False
    created: float = 0.0
    expires: float | None = None

    @property
    def owner(self) -> str:
        """The owner of the data that the key stores; never "", which is the daemon's owner."""
        return f"{self.name}#{self.id}"


class KeyHolder:
    """A key in use, with one text: `allowance` counts its requests, and `limits` are those of
    one request. A key that `may_always_ask` has the scope inference and does not expire, so its requests need no
    `check`."""

    def __init__(self, key: ApiKey, wall: Callable[[], float], allowance: Allowance) -> None:
        self.key = key
        self.may_always_ask = Scope.INFERENCE in key.scopes and key.expires is None
        self.allowance = allowance
        self.limits = RequestLimits.of(key.max_seconds, key.max_tokens)
        self._wall = wall
        self._models = _matching(key.models) if key.models else None

    def check(self, scope: Scope) -> None:
        """Raises `Unauthorized` once the key has expired, and `Forbidden` for a scope that it lacks."""
        key = self.key
        if key.expires is not None and self._wall() >= key.expires:
            raise Unauthorized(f"the key {key.name} has expired: make another with `modelrunner keys create`")
        if scope not in key.scopes:
            raise Forbidden(f"the key {key.name} lacks the scope {scope}; it has {', '.join(key.scopes)}")

    def check_model(self, *names: str) -> None:
        """Raises `Forbidden` unless the key allows one of the `names` of a model. The text names no model: it is the
        same for one that is here, one that is not, and an alias."""
        if not self.allows(*names):
            raise Forbidden(f"the key {self.key.name} may not use this model; it may use {', '.join(self.key.models)}")

    def allows(self, *names: str) -> bool:
        """Returns whether the key allows one of the names."""
        return self._models is None or any(map(self._models.fullmatch, names))


class KeyRing:
    """`watchers` are called after every change. `listener` is the address of the daemon's TCP listener, None without
    one: beyond loopback, the last key stays. `clock` is monotonic, `wall` the time of day, both in seconds."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time
    ) -> None:
        """Raises `StorageFailed` for a damaged file: without it, revoked keys could not be told from others, and a
        daemon without keys would let everybody in."""
        self._file = JsonFile(path, list[ApiKey], required=True)
        self._clock = clock
        self._wall = wall
        self._changing = threading.Lock()
        self.listener: IPv4Address | IPv6Address | None = None
        self.watchers: list[Callable[[], None]] = []
        self._holders: dict[str, KeyHolder] = {}
        self._by_digest: dict[str, KeyHolder] = {}
        self._use(self._file.load() or [])

    def __bool__(self) -> bool:
        """Returns whether there are keys, so that TCP is open only to their owners."""
        return bool(self._holders)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter([holder.key for holder in self._holders.values()])

    def owner(self, owner: str) -> KeyHolder | None:
        """Returns the key whose `ApiKey.owner` is `owner`, None if it was revoked."""
        holder = self._holders.get(owner.partition("#")[0])
        return holder if holder is not None and holder.key.owner == owner else None

    def find(self, text: str) -> KeyHolder:
        """Returns the key with this text, expired or not. Raises `Unauthorized`.

        The look-up is by digest: its time tells nothing about the text of a stored key, since nobody can choose a text
        whose digest is near that of a key."""
        holder = self._by_digest.get(_digest(text))
        if holder is None:
            raise Unauthorized("unknown API key: `modelrunner keys ls` lists the keys")
        return holder

    def known(self, text: str) -> KeyHolder | None:
        """Returns the key with this text, None without one."""
        return self._by_digest.get(_digest(text))

    def admits(self, key: ApiKey | None) -> bool:
        """Returns whether a request that was admitted with this key, or over TCP without one, would be admitted now."""
        if key is None:
            return not self._holders
        holder = self._holders.get(key.name)
        return holder is not None and holder.key.digest == key.digest and self.left(key) > 0

    def left(self, key: ApiKey) -> float:
        """Returns the seconds until the key expires, infinity for never."""
        return key.expires - self._wall() if key.expires is not None else math.inf

    def create(
        self,
        name: str,
        *,
        scopes: Sequence[str] = (Scope.INFERENCE,),
        models: Iterable[str] = (),
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        concurrency: int | None = None,
        max_tokens: int | None = None,
        max_seconds: float | None = None,
        batch: bool = False,
        age: float | None = None,
    ) -> tuple[ApiKey, str]:
        """Makes a key, and returns it with its text, which is kept nowhere. The limits are those of `ApiKey`; the key
        expires after `age` seconds, never if that is None. Blocks. Raises `BadRequest`, `Conflict`,
        `InsufficientDisk`, `StorageFailed`."""
        wanted, allowed = _scopes(scopes), tuple(models)
        if allowed and Scope.ADMIN in wanted:
            raise BadRequest(
                "a key with the scope admin makes keys of every model: leave its models out", param="models"
            )
        if age is not None and age > _LONGEST:
            raise BadRequest("expires is an age of at most 36500d; leave it out for never", param="expires")
        if not _NAME.fullmatch(name):
            raise BadRequest(f"{name!r} is not a name for a key: use at most 64 letters, digits, dots and dashes")
        with self._changing:
            if name in self._holders:
                raise Conflict(f"there is a key {name} already: `modelrunner keys rotate {name}` gives it a new text")
            return self._keep(
                ApiKey(
                    name=name,
                    id=secrets.token_hex(8),
                    digest="",
                    scopes=wanted,
                    models=allowed,
                    requests_per_minute=requests_per_minute,
                    tokens_per_minute=tokens_per_minute,
                    concurrency=concurrency,
                    max_tokens=max_tokens,
                    max_seconds=max_seconds,
                    batch=batch,
                    expires=self._wall() + age if age is not None else None,
                )
            )

    def rotate(self, name: str) -> tuple[ApiKey, str]:
        """Gives a key a new text; the old one is refused from now on. Raises `KeyNotFound`,
        `InsufficientDisk`, `StorageFailed`."""
        with self._changing:
            return self._keep(self._get(name).key)

    def revoke(self, name: str, *, open: bool = False) -> None:
        """Revokes a key. Without keys, TCP is open to everybody: so the last key, expired or not, is revoked only with
        `open`, and never while the daemon listens beyond loopback. Raises `KeyNotFound`, `Conflict`,
        `InsufficientDisk`, `StorageFailed`."""
        with self._changing:
            self._get(name)
            if len(self._holders) == 1 and self.listener is not None:
                if not self.listener.is_loopback:
                    raise Conflict(
                        f"{name} is the last key, and the daemon listens beyond loopback: make another first"
                    )
                if not open:
                    raise Conflict(
                        f"{name} is the last key: without it, everybody on this machine may do everything over TCP, "
                        f"whatever key they send. Make another key first, or run `modelrunner keys revoke {name} "
                        "--open` (`?open=true`)"
                    )
            self._save([key for key in self if key.name != name])

    def _get(self, name: str) -> KeyHolder:
        if name not in self._holders:
            raise KeyNotFound(f"there is no key {name}: `modelrunner keys ls` lists the keys")
        return self._holders[name]

    def _keep(self, key: ApiKey) -> tuple[ApiKey, str]:
        text = _PREFIX + secrets.token_urlsafe(32)
        kept = msgspec.structs.replace(key, digest=_digest(text), created=self._wall())
        self._save([*(each for each in self if each.name != key.name), kept])
        return kept, text

    def _save(self, keys: list[ApiKey]) -> None:
        with translated("storing the keys", self._file.path.parent):
            self._file.save(keys)
        self._use(keys)

    def _use(self, keys: list[ApiKey]) -> None:
        """Uses these keys. A key with a new text keeps its counts."""
        self._holders = {key.name: self._holder(key) for key in keys}
        self._by_digest = {holder.key.digest: holder for holder in self._holders.values()}
        for changed in self.watchers:
            changed()

    def _holder(self, key: ApiKey) -> KeyHolder:
        held = self._holders.get(key.name)
        if held is not None and held.key == key:
            return held
        rates = Rates(key.requests_per_minute, key.tokens_per_minute, key.concurrency)
        allowance = Allowance(f"the key {key.name}", rates, self._clock) if held is None else held.allowance
        return KeyHolder(key, self._wall, allowance)


def _scopes(names: Sequence[str]) -> tuple[Scope, ...]:
    """Returns the scopes with these names. Raises `BadRequest` for an unknown name."""
    known = list(Scope)
    for name in names:
        if name not in known:
            raise BadRequest(f"unknown scope {name!r}: the scopes are {', '.join(known)}", param="scopes")
    return tuple(map(Scope, names))


def _matching(patterns: Iterable[str]) -> re.Pattern[str]:
    """Compiles an expression for texts that match one of the patterns, in which `*` stands for any text."""
    return re.compile("|".join(map(_expression, patterns)), re.DOTALL)


def _expression(pattern: str) -> str:
    """Each part between two stars is sought once, at its first place: a name of a million letters takes no longer."""
    first, *parts = map(re.escape, pattern.split("*"))
    if not parts:
        return first
    return first + "".join(f"(?>.*?{part})" for part in parts[:-1]) + f".*{parts[-1]}"


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
