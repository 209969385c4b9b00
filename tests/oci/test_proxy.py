"""Registries behind a proxy, as the environment names it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from modelrunner.errors import SourceFailed
from modelrunner.oci.credentials import Credential
from modelrunner.oci.registries import RegistryRules
from tests.oci.conftest import Machine
from tests.oci.fake import FakeRegistry
from tests.oci.registry import HTPASSWD, Registry, serving
from tests.oci.test_pull import self_signed, tiny
from tests.oci.test_push import package, pusher
from tests.pull.models import gguf
from tests.pull.test_puller import ignore

NAME = "registry.invalid:5000"  # no name server knows it (RFC 6761): only the proxy does


class Proxy:
    """Connects every request, forwarded or tunnelled, to `target`. `asked` are the first lines, `heads` all else that
    it could read."""

    def __init__(self, target: str) -> None:
        self.address, self.asked, self.heads = "", list[str](), list[str]()
        self._host, _, self._port = target.rpartition(":")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Proxy"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = "http://{}:{}".format(*server.sockets[0].getsockname())
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, _, rest = head.partition("\r\n")
            self.asked.append(first)
            self.heads.append(rest)
            upstream, out = await asyncio.open_connection(self._host, int(self._port))
            if first.startswith("CONNECT "):
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                method, address, version = first.split(" ")
                path = "/" + address.split("/", 3)[3]
                out.write(f"{method} {path} {version}\r\nConnection: close\r\n{rest}".encode())
            await asyncio.gather(_copy(reader, out), _copy(upstream, writer))
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    writer.close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
async def fake() -> AsyncIterator[FakeRegistry]:
    async with FakeRegistry({"ai/tiny": tiny()}).running() as running:
        yield running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("certificate"), NAME.partition(":")[0])


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]) -> Iterator[Registry]:
    with serving(tmp_path_factory.mktemp("secured"), users=HTPASSWD, tls=certificate) as running:
        yield running


async def test_a_registry_is_asked_through_the_proxy_unless_it_is_excepted(
    fake: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path / "m", {NAME: RegistryRules(plain_http=True)})
    async with Proxy(fake.host).running() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.address)
        monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")  # as programs export it, and nothing needs it
        assert (await machine.puller.pull(f"{NAME}/ai/tiny", ignore)).id == fake.models["ai/tiny"].id
        assert all(f" http://{NAME}/v2/ai/tiny/" in line for line in proxy.asked)
        proxy.asked.clear()
        monkeypatch.setenv("NO_PROXY", "registry.invalid")
        with pytest.raises(SourceFailed, match=r"registry\.invalid"):
            await Machine(tmp_path / "n", {NAME: RegistryRules(plain_http=True)}).puller.pull(f"{NAME}/ai/tiny", ignore)
        assert proxy.asked == []


async def test_a_proxy_sees_no_password_and_no_byte_of_what_tls_protects(
    secured: Registry, certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = {NAME: RegistryRules(ca=certificate[0])}
    here, there = Machine(tmp_path / "here", rules), Machine(tmp_path / "there", rules)
    async with Proxy(secured.host).running() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.address)
        id = await package(here, "mine", {"x.gguf": gguf(1 << 20)})
        for machine in (here, there):
            machine.credentials.store(NAME, Credential("ada", "secret"))
        await pusher(here).push("mine", f"{NAME}/team/mine", ignore)
        assert (await there.puller.pull(f"{NAME}/team/mine", ignore)).id == id
        assert {line.split()[1] for line in proxy.asked} == {NAME}
        assert "authorization" not in "".join(proxy.heads).lower()


async def test_a_registry_on_this_machine_is_never_asked_through_a_proxy(
    fake: FakeRegistry, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may do without TLS: its password would leave the machine readable."""
    async with Proxy(fake.host).running() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.address)
        monkeypatch.setenv("ALL_PROXY", proxy.address)
        assert (await machine.puller.pull(f"{fake.host}/ai/tiny", ignore)).id == fake.models["ai/tiny"].id
        assert proxy.asked == []
