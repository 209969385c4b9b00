"""Obtains the credentials that a registry asks for before it answers: a password, or a token from its token service
(https://distribution.github.io/distribution/spec/auth/token/, and /oauth/ for refresh tokens).

A password goes to the registry's own origin and to token services that it may name: those on its own origin, those of
the table in `registries`, and those that a person has named; over TLS unless the registry itself may do without. A
password is never sent along a redirect. Without a password, any public token service is asked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import msgspec

from modelrunner import __version__
from modelrunner.errors import SourceFailed
from modelrunner.oci.credentials import Credential, Credentials
from modelrunner.oci.registries import RegistryEndpoint
from modelrunner.web.session import HubAnswer, ask

if TYPE_CHECKING:
    import httpx

AGENT = {"User-Agent": f"modelrunner/{__version__}"}
_LARGEST = 1 << 16
_CLIENT = "modelrunner"
_LONGEST = 8192
_TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_PART = re.compile(
    rf"\s*+,?\s*+(?:(?P<key>{_TOKEN}+)\s*+=\s*+(?:\"(?P<quoted>(?:[^\"\\]|\\.)*+)\"|(?P<plain>{_TOKEN}))|(?P<scheme>{_TOKEN}))"
)


@dataclass(frozen=True, slots=True)
class Challenge:
    """`scheme` and the names of the parameters are in small letters."""

    scheme: str
    parameters: Mapping[str, str]


def challenges(header: str) -> list[Challenge]:
    """Returns the challenges of a WWW-Authenticate header (RFC 9110, section 11.6.1), in order, up to the first that
    cannot be parsed."""
    parts: list[tuple[str, dict[str, str]]] = []
    position, header = 0, header[:_LONGEST]
    while (match := _PART.match(header, position)) is not None:
        position = match.end()
        if match["scheme"] is not None:
            parts.append((match["scheme"].lower(), {}))
        elif parts:
            quoted = match["quoted"]
            value = match["plain"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            parts[-1][1].setdefault(match["key"].lower(), value)
    return [Challenge(scheme, parameters) for scheme, parameters in parts]


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access: str = msgspec.field(default="", name="access_token")


class Authorizer:
    """Authorizes requests to one endpoint. `token` is the caller's own and replaces every other credential; `seconds`
    limits the wait for each answer."""

    def __init__(
        self,
        client: "httpx.AsyncClient",
        endpoint: RegistryEndpoint,
        credentials: Credentials,
        token: str | None,
        seconds: float,
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._credentials = credentials
        self._token = token
        self._seconds = seconds
        self._headers: dict[str, str] = {}
        self.anonymous = token is None

    def headers(self, scope: str) -> dict[str, str]:
        """Returns the headers for a request to the endpoint's own origin. `scope` is what the request needs, such as
        `repository:ai/smollm2:pull`."""
        value = f"Bearer {self._token}" if self._token else self._headers.get(scope)
        return AGENT | ({"Authorization": value} if value else {})

    async def renew(self, scope: str, url: str, headers: Mapping[str, str]) -> dict[str, str] | None:
        """Returns the headers for another attempt after an answer with status 401 from `url`; None if nothing else can
        be tried. Raises `SourceFailed`."""
        if self._token or not same_origin(url, self._endpoint.url):
            return None
        offered = {challenge.scheme: challenge for challenge in challenges(headers.get("www-authenticate", ""))}
        credential = await self._credentials.find(self._endpoint.host)
        self.anonymous = credential is None
        if "bearer" in offered:
            value = f"Bearer {await self._bearer(offered['bearer'], credential, scope)}"
        elif "basic" in offered and credential is not None and credential.user:
            value = credential.basic
        else:
            return None
        if self._headers.get(scope) == value:
            return None
        self._headers[scope] = value
        return self.headers(scope)

    async def _bearer(self, challenge: Challenge, credential: Credential | None, scope: str) -> str:
        host = self._endpoint.host
        realm = self._realm(challenge.parameters.get("realm", ""), credential)
        service = challenge.parameters.get("service", "")
        query = {"scope": scope.split()} | ({"service": service} if service else {})
        if credential is not None and credential.refresh:
            form = {"grant_type": "refresh_token", "client_id": _CLIENT, "refresh_token": credential.refresh}
            form |= {"scope": scope, "service": service}
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            answer = await self._ask(realm, AGENT | kind, urlencode(form).encode())
        else:
            login = {"Authorization": credential.basic} if credential is not None else {}
            answer = await self._ask(str(realm.copy_merge_params(query)), AGENT | login)
        if answer.status in (400, 401, 403):
            raise SourceFailed(f"{host} refuses the login: look at the user and password, `modelrunner login {host}`")
        try:
            if answer.status == 200 and (token := _decoded(answer.body)):
                return token
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass
        raise SourceFailed(f"the token service of {host} gave no token (it answered {answer.status}); try again later")

    async def _ask(self, url: "str | httpx.URL", headers: Mapping[str, str], form: bytes | None = None) -> HubAnswer:
        return await ask(
            self._client,
            str(url),
            headers,
            limit=_LARGEST,
            method="GET" if form is None else "POST",
            redirects=False,
            seconds=self._seconds,
            content=form,
        )

    def _realm(self, text: str, credential: Credential | None) -> "httpx.URL":
        """Returns the address of the token service. Raises `SourceFailed` for an address that may not be asked."""
        import httpx

        host = self._endpoint.host
        try:
            realm = httpx.URL(text)
        except (httpx.InvalidURL, ValueError):
            realm = httpx.URL("")
        if realm.scheme not in ("https", "http") or not realm.host or realm.userinfo:
            raise SourceFailed(f"{host} names a token service with an invalid address")
        own = same_origin(str(realm), self._endpoint.url)
        listed = {realm.host, realm.netloc.decode("ascii")} & set(self._endpoint.token_hosts)
        if realm.scheme == "http" and not self._endpoint.url.startswith("http:"):
            raise SourceFailed(f"{host} names a token service without TLS, {realm.host}: it is not asked")
        if credential is not None and not own and not listed:
            raise SourceFailed(
                f"{host} wants its password sent to {realm.netloc.decode('ascii')}, which is another host: if you trust"
                f' that, add it to token_hosts in the table [registries."{host}"] of the configuration file'
            )
        return realm


def _decoded(body: bytes) -> str:
    """Returns the token; "" for a token that cannot stand in a header."""
    answer = msgspec.json.decode(body, type=_Token)
    token = answer.token or answer.access
    return token if token.isascii() and token.isprintable() and " " not in token else ""


def same_origin(one: str, other: str) -> bool:
    import httpx

    first, second = httpx.URL(one), httpx.URL(other)
    return (first.scheme, first.host, first.port) == (second.scheme, second.host, second.port)
