"""The registries: their endpoints, and the rules that the configuration sets for each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from modelrunner.web.proxies import is_loopback

HUB = "docker.io"
_HUB_HOST = "registry-1.docker.io"
# Token services on another host than their registry's, run by the registry's own operator.
_TOKEN_HOSTS = {
    HUB: ("auth.docker.io",),
    "registry.gitlab.com": ("gitlab.com",),
    "nvcr.io": ("authn.nvidia.com",),
}


@dataclass(frozen=True, slots=True)
class RegistryRules:
    """A `[registries."HOST"]` table. `mirrors` are asked first, in their order; `location` is asked in place of the
    registry itself. `plain_http` allows HTTP without TLS; None allows it for this machine alone. `ca` is a file with
    further certificates to trust. `token_hosts` may get the registry's credentials, `hosts` are private hosts that it
    may redirect to. `keys` are files with public keys, one of which must have signed each model."""

    mirrors: tuple[str, ...] = ()
    location: str | None = None
    plain_http: bool | None = None
    ca: Path | None = None
    token_hosts: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    keys: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class RegistryEndpoint:
    """An address that answers for a registry. `host` is the name under which its credentials are stored, `url` has no
    path; `rules` are those of `host`. `configured` is True if the configuration names it."""

    host: str
    url: str
    rules: RegistryRules = field(default_factory=RegistryRules)
    configured: bool = False

    @property
    def token_hosts(self) -> tuple[str, ...]:
        """Returns the hosts that may ask for the credentials besides the registry, each with its port unless that is
        the default."""
        return (*_TOKEN_HOSTS.get(self.host, ()), *self.rules.token_hosts)

    @property
    def named(self) -> frozenset[str]:
        """Returns the hosts that the configuration names for the registry, and itself if it does."""
        return frozenset({*self.rules.token_hosts, *self.rules.hosts, *((self.host,) if self.configured else ())})


class Registries:
    """The rules of each registry. `replace` sets new rules for the next pull."""

    def __init__(self, rules: Mapping[str, RegistryRules] | None = None) -> None:
        self._rules = dict(rules or {})

    def replace(self, rules: Mapping[str, RegistryRules]) -> None:
        self._rules = dict(rules)

    def keys(self, host: str) -> tuple[Path, ...]:
        """Returns the files with public keys, one of which must have signed each model of the registry."""
        return self._rules[host].keys if host in self._rules else ()

    def endpoints(self, host: str) -> list[RegistryEndpoint]:
        """Returns the endpoints to pull from, in the order in which they are asked."""
        rules = self._rules.get(host, RegistryRules())
        return [*(self._endpoint(mirror, configured=True) for mirror in rules.mirrors), self.origin(host)]

    def origin(self, host: str) -> RegistryEndpoint:
        """Returns the endpoint to push to: the registry itself, or its `location`."""
        rules = self._rules.get(host, RegistryRules())
        return self._endpoint(rules.location, configured=True) if rules.location else self._endpoint(host)

    def _endpoint(self, place: str, *, configured: bool = False) -> RegistryEndpoint:
        """Returns the endpoint of `place`, a host, or an address whose scheme says whether TLS is used."""
        scheme, _, host = place.rpartition("://")
        host = host.rstrip("/")
        rules = self._rules.get(host, RegistryRules())
        if not scheme:
            plain = rules.plain_http
            if plain is None:
                plain = rules.ca is None and is_loopback(urlsplit(f"//{host}").hostname or "")
            scheme = "http" if plain else "https"
        url = f"{scheme}://{_HUB_HOST if host == HUB else host}"
        return RegistryEndpoint(host, url, rules, configured or host in self._rules)
