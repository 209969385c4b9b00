from collections.abc import Iterator
from pathlib import Path

import pytest

from modelrunner.oci.credentials import Credentials
from modelrunner.oci.registries import Registries, RegistryRules
from modelrunner.oci.repository import Manner
from modelrunner.pull import Puller
from modelrunner.pull.ociregistry import RegistrySource
from modelrunner.store import Store
from tests.oci.registry import HTPASSWD, Registry, serving
from tests.pull.test_hostile import at_once

MANNER = Manner(pause=at_once, look_up_limit=20.0, patience=20.0)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with serving(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that wants a password: ada's is `secret`."""
    with serving(tmp_path_factory.mktemp("locked"), users=HTPASSWD) as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data")


class Machine:
    """A store with what pulls into it and pushes from it, as a daemon has it. `environ` is the daemon's."""

    def __init__(self, folder: Path, rules: dict[str, RegistryRules] | None = None, manner: Manner = MANNER) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.environ = {"DOCKER_CONFIG": str(folder / "docker"), "PATH": str(folder / "bin")}
        self.store = Store(folder / "data")
        self.registries = Registries(rules)
        self.credentials = Credentials(folder / "logins.json", self.environ)
        self.puller = Puller(self.store, [RegistrySource(self.registries, self.credentials, manner)])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")
