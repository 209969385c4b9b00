"""Which registries there are, where they answer, and what a person has allowed for each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from modelrunner.web.session import is_loopback

HUB = "docker.io"
_HUB_HOST = "registry-1.docker.io"
# Token services on another host than their registry's that the same people run.
_TOKEN_HOSTS = {
    HUB: ("auth.docker.io",),
    "registry.gitlab.com": ("gitlab.com",),
    "nvcr.io": ("authn.nvidia.com",),
}


@dataclass(frozen=True, slots=True)
class RegistryRules:
    """A `[registries."HOST"]` table. `mirrors` are asked first, in their order; `location` is asked in place of the
    registry itself. `plain_http` None allows it for this machine alone. `ca` is a file with further certificates to
    trust. `token_hosts` may get the registry's credentials, `hosts` are where it may redirect to although they are
    private; `keys` are files with public keys, one of which must have signed each model."""

    mirrors: tuple[str, ...] = ()
    location: str | None = None
    plain_http: bool | None = None
    ca: Path | None = None
    token_hosts: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    keys: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class RegistryEndpoint:
    """A place that answers for a registry. `host` is the name that its credentials are kept under, `url` has no path;
    `rules` are those of `host`."""

    host: str
    url: str
    rules: RegistryRules = field(default_factory=RegistryRules)

    @property
    def token_hosts(self) -> tuple[str, ...]:
        """Hosts, with a port where it is not the usual one, that may ask for the credentials, besides the registry."""
        return (*_TOKEN_HOSTS.get(self.host, ()), *self.rules.token_hosts)

    @property
    def named(self) -> frozenset[str]:
        """Hosts that a person has named for it."""
        return frozenset({*self.rules.token_hosts, *self.rules.hosts})


class Registries:
    """The rules by registry. `replace` takes new ones for the next pull."""

    def __init__(self, rules: Mapping[str, RegistryRules] | None = None) -> None:
        self._rules = dict(rules or {})

    def replace(self, rules: Mapping[str, RegistryRules]) -> None:
        self._rules = dict(rules)

    def keys(self, host: str) -> tuple[Path, ...]:
        """Files with the public keys, one of which must have signed each model of the registry."""
        return self._rules[host].keys if host in self._rules else ()

    def endpoints(self, host: str) -> list[RegistryEndpoint]:
        """Where to pull from, the first first."""
        rules = self._rules.get(host, RegistryRules())
        return [*(self._endpoint(mirror) for mirror in rules.mirrors), self.origin(host)]

    def origin(self, host: str) -> RegistryEndpoint:
        """Where to push to: the registry itself, or what stands for it."""
        rules = self._rules.get(host, RegistryRules())
        return self._endpoint(rules.location) if rules.location else self._endpoint(host)

    def _endpoint(self, place: str) -> RegistryEndpoint:
        """`place` is a host, or an address whose scheme says whether TLS is used."""
        scheme, _, host = place.rpartition("://")
        host = host.rstrip("/")
        rules = self._rules.get(host, RegistryRules())
        if not scheme:
            plain = rules.plain_http
            if plain is None:
                plain = rules.ca is None and is_loopback(urlsplit(f"//{host}").hostname or "")
            scheme = "http" if plain else "https"
        return RegistryEndpoint(host, f"{scheme}://{_HUB_HOST if host == HUB else host}", rules)
