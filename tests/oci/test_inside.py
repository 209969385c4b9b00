"""A client over TCP cannot have the daemon look into this machine or its network."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from modelrunner.errors import Forbidden, ModelRunnerError, SourceFailed
from modelrunner.oci.registries import RegistryRules
from modelrunner.web.session import public_only
from tests.oci.conftest import MANNER, Machine
from tests.ports import reserved_port
from tests.pull.test_puller import ignore


@pytest.fixture
def asked_over_tcp() -> Iterator[None]:
    token = public_only.set(True)
    yield
    public_only.reset(token)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[int, list[None]]]:
    """A port of this machine, and a list with an entry for each connection to it."""
    came: list[None] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(None)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], came
    finally:
        server.close()
        await server.wait_closed()


async def refusal(machine: Machine, name: str) -> str:
    with pytest.raises(Forbidden) as caught:
        await machine.puller.pull(name, ignore)
    return caught.value.message


@pytest.mark.usefixtures("asked_over_tcp")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_nothing_is_sent_and_nothing_is_told(machine: Machine, host: str) -> None:
    """The text is the same for an open port and a closed one."""
    async with listening() as (port, came):
        told = await refusal(machine, f"{host}:{port}/x/y")
        with reserved_port() as closed:
            assert await refusal(machine, f"{host}:{closed}/x/y") == told
        assert came == []
        assert "registries" in told


@pytest.mark.usefixtures("asked_over_tcp")
async def test_a_registry_that_the_configuration_names_may_be_here(tmp_path: Path) -> None:
    async with listening() as (port, came):
        rules = {f"127.0.0.1:{port}": RegistryRules()}
        machine = Machine(tmp_path / "m", rules, MANNER)
        with pytest.raises(SourceFailed):
            await machine.puller.pull(f"127.0.0.1:{port}/x/y", ignore)
        assert came


async def test_on_the_unix_socket_the_owner_may_ask_anywhere(machine: Machine) -> None:
    async with listening() as (port, came):
        with pytest.raises(ModelRunnerError) as caught:
            await machine.puller.pull(f"127.0.0.1:{port}/x/y", ignore)
        assert came
        assert not isinstance(caught.value, Forbidden)
