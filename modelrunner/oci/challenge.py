"""Parses the WWW-Authenticate header (RFC 9110, section 11.6.1), in which a registry asks for credentials."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

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
    """Returns the challenges of a header, in order, up to the first that cannot be parsed."""
    found: list[tuple[str, dict[str, str]]] = []
    position, header = 0, header[:_LONGEST]
    while (match := _PART.match(header, position)) is not None:
        position = match.end()
        if match["scheme"] is not None:
            found.append((match["scheme"].lower(), {}))
        elif found:
            quoted = match["quoted"]
            value = match["plain"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            found[-1][1].setdefault(match["key"].lower(), value)
    return [Challenge(scheme, parameters) for scheme, parameters in found]
