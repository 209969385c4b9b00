"""RPC servers as devices, with a made-up llama-server that lists them."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from modelrunner.backend import BackendContext, BackendState
from modelrunner.errors import BackendExited
from modelrunner.scheduler.devices import joined
from modelrunner.types import EngineDevice, RequiredMemory, Variant
from modelrunner_llamacpp import LlamaCppBackend, environment, rpc
from modelrunner_llamacpp.engines import Engine, EngineKind
from tests.llamacpp.models import SMOLLM2, bundle, spec
from tests.ports import reserved_port

GIB = 1 << 30


@contextmanager
def listening(port: int = 0) -> Iterator[str]:
    """A port where something listens, by its address."""
    with socket.create_server(("127.0.0.1", port)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


class Asked:
    """An engine that lists one device of each server, and what it was asked."""

    def __init__(self) -> None:
        self.servers: list[str] = []

    def __call__(self, server: str) -> list[EngineDevice]:
        self.servers.append(server)
        return [EngineDevice("CUDA0", "a card of this machine", GIB, GIB), EngineDevice("RPC0", server, GIB, GIB)]


def test_a_server_is_asked_once_and_one_that_is_away_again_later() -> None:
    now, asked = [0.0], Asked()
    with listening() as here, reserved_port() as port:
        servers = rpc.Servers([f"127.0.0.1:{port}", here], lambda: now[0])
        away = EngineDevice("RPC0", f"127.0.0.1:{port}", 0, 0, f"127.0.0.1:{port}")
        for _ in range(2):
            assert servers.devices(asked) == [away, EngineDevice("RPC1", here, GIB, GIB, here)]
        assert asked.servers == [here]
        now[0] = 31.0
        with listening(port):
            assert [device.total for device in servers.devices(asked)] == [GIB, GIB]


def test_a_server_is_not_asked_while_an_engine_uses_it_and_again_after_that_failed() -> None:
    asked, failed = Asked(), BackendExited(1)
    with listening() as here:
        servers = rpc.Servers([here])
        assert [device.total for device in servers.devices(asked)] == [GIB]

    def use(end: BackendExited | None) -> None:
        with servers.used([here]):
            assert [device.total for device in servers.devices(asked)] == [GIB]
            if end:
                raise end

    use(None)  # an engine that was stopped says nothing of its server
    with pytest.raises(BackendExited):
        use(failed)
    assert [device.total for device in servers.devices(asked)] == [0], "it keeps its number, without memory"
    assert asked.servers == [here]


def test_a_server_that_is_away_is_a_device_with_a_fault_whatever_its_host_is_called() -> None:
    lists = [EngineDevice("RPC0", "nvidia-box:1", 0, 0, "nvidia-box:1"), EngineDevice("RPC1", "b:1", GIB, GIB, "b:1")]
    found, numbers = joined([], {"llama.cpp": lists})
    assert [(device.name, device.fault) for device in found] == [("nvidia-box:1", "it does not answer"), ("b:1", "")]
    assert numbers == {"llama.cpp": (0, 1)}


def test_no_second_engine_fits_on_a_server() -> None:
    """It would wait without a word until the first one ends."""
    listed = [EngineDevice("CUDA0", "a card", 100, 100), *[EngineDevice("RPC0", "a:1", 100, 100, "a:1")] * 2]
    rooms = (100, 80, 80)

    def counted(*vram: int) -> tuple[int, ...]:
        return rpc.alone(Variant(spec(bundle(SMOLLM2)), RequiredMemory(1, vram)), listed, rooms).memory.vram

    assert counted(10) == (10,)
    assert counted(10, 0, 0) == (10, 0, 0)
    assert counted(10, 5, 0) == (10, 60, 60)
    assert counted(0, 0, 70) == (0, 60, 70)


def test_the_engine_lists_devices_of_servers_and_may_connect_only_to_use_them(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && exec echo 'version: 11549 (abc)'\n"
        'echo "Available devices:"\n[ "$1" = --rpc ] || exec echo "  (none)"\n'
        'echo "  RPC0: $2 (24105 MiB, 20000 MiB free)"\n'
    )
    program.chmod(0o755)
    with listening() as here:
        settings = {"llama_server": str(program), "rpc": [here]}
        backend = LlamaCppBackend(BackendContext(tmp_path, tmp_path, tmp_path, settings))
        assert backend.devices() == (EngineDevice("RPC0", here, 24105 << 20, 20000 << 20, here),)
    assert str(backend.status()).endswith(f"(native) on RPC0 {here}")
    engine = Engine(EngineKind.NATIVE, program, "1")
    assert environment.permissions(engine, options=("--rpc",)).network
    assert not environment.permissions(engine, options=("--device",)).network


def test_an_engine_that_cannot_use_servers_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "llama.cpp/bin").mkdir(parents=True)
    (tmp_path / "llama.cpp/bin/python").touch(mode=0o700)
    (tmp_path / "llama.cpp/engine.json").write_text('{"kind": "wheel", "version": "1", "devices": false}')
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines/llama.cpp").symlink_to(tmp_path / "llama.cpp")
    context = BackendContext(tmp_path / "engines", tmp_path, tmp_path, {"rpc": ["127.0.0.1:50052"]})
    status = LlamaCppBackend(context).status()
    assert status.state is BackendState.ERROR
    assert "`modelrunner install --build llama.cpp`" in status.details


@pytest.mark.parametrize("server", ["", "host", "host:", ":1", "host:x", "a,b:1", "a b:1", "http://a:1"])
def test_an_address_is_host_and_port(server: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rpc"):
        LlamaCppBackend(BackendContext(tmp_path, tmp_path, tmp_path, {"rpc": [server]}))
