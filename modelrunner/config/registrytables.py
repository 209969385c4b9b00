"""The `[registries."HOST"]` tables of the configuration file. A table whose name is not a registry's is refused: its
rules, such as signatures, would never apply."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from modelrunner.config.locations import expanded

_HOST = re.compile(r"(?:[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:]+\])(?::[0-9]{1,5})?")
_HUB = "docker.io"
_HUB_NAMES = ("index.docker.io", "registry-1.docker.io", "hub.docker.com", "docker.com")
_HUBS = ("hf.co", "huggingface.co", "modelscope.cn", "pypi", "pypi.org")


def _host(name: str) -> str:
    name = name.lower()
    if name in _HUBS:
        raise ValueError("it is not a registry: models there have neither signatures nor mirrors")
    if name in _HUB_NAMES:
        raise ValueError(f"its name is {_HUB}")
    if not _HOST.fullmatch(name):
        raise ValueError("a registry is HOST or HOST:PORT, without a scheme or a path")
    return name


RegistryHost = Annotated[str, AfterValidator(_host)]
_Place = Annotated[Path, AfterValidator(expanded)]


class RegistryTable(BaseModel):
    """One table; docs/models.md describes each key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mirrors: tuple[str, ...] = ()
    location: str | None = None
    plain_http: bool | None = None
    ca: _Place | None = None
    token_hosts: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    keys: tuple[_Place, ...] = ()
