"""The lock, the sockets and the addresses of a daemon."""

import asyncio
import os
import signal
import socket
import ssl
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from modelrunner.config import lockfile
from modelrunner.config.locations import ConfigurationError
from modelrunner.daemon import instance
from modelrunner.daemon.instance import AlreadyRunning, UnixListener
from tests.api.conftest import StartDaemon
from tests.store.samples import deep_folder
from tests.waiting import HUNG


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield server


def test_the_second_daemon_of_a_data_directory_says_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with listening(path), instance.hold(tmp_path / "data", path):
        with pytest.raises(AlreadyRunning) as caught, instance.hold(tmp_path / "data", tmp_path / "b.sock"):
            pass
        assert f"process {os.getpid()}" in caught.value.message
        assert f"unix://{path}" in caught.value.message
    with instance.hold(tmp_path / "data", path):
        pass


def test_a_daemon_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    def take_over() -> None:
        with instance.hold(tmp_path, tmp_path / "b.sock"):
            pass

    with ThreadPoolExecutor() as pool:
        with instance.hold(tmp_path, tmp_path / "gone.sock"):
            waiting = pool.submit(take_over)
        waiting.result(timeout=HUNG)


def test_a_data_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigurationError, match="file/data"),
        instance.hold(tmp_path / "file" / "data", tmp_path / "s"),
    ):
        pass


def test_a_live_socket_is_never_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with listening(path):
        with pytest.raises(AlreadyRunning):
            UnixListener(path)
        assert instance.answers(path)
        assert os.listdir(tmp_path) == ["a.sock"]


def test_a_dead_socket_is_replaced_once_the_new_one_listens(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with listening(path):
        pass
    with closing(UnixListener(path)) as listener:
        assert not instance.answers(path)
        listener.socket.listen()
        listener.publish()
        assert instance.answers(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == []


def test_what_is_no_socket_is_left_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match="in the way"):
        UnixListener(path)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="in the way"):
        UnixListener(path)


def test_a_socket_that_another_took_over_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    listener = UnixListener(path)
    listener.publish()
    path.unlink()
    with listening(path):
        listener.close()
        assert instance.answers(path)


def test_a_path_too_long_for_a_socket_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="longer than 100 bytes"):
        UnixListener(tmp_path / ("x" * 100))


def test_leftovers_of_a_killed_daemon_go_and_live_ones_stay(tmp_path: Path) -> None:
    with listening(tmp_path / "dead.sock"):
        pass
    (tmp_path / "start.lock").touch()
    (tmp_path / "0123abcd").touch()  # in the place of a runner's folder
    with deep_folder(tmp_path / "4567abcd"), listening(tmp_path / "live.sock"):
        instance.remove_dead_sockets(tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["0123abcd", "live.sock", "start.lock"]


def test_a_lock_file_that_is_none_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / lockfile.NAME)
    assert lockfile.holder(tmp_path) is None
    with pytest.raises(ConfigurationError, match="not a regular file"), instance.hold(tmp_path, tmp_path / "d.sock"):
        pass


def test_runtime_folders_that_were_abandoned_go(tmp_path: Path) -> None:
    """Their data directories may be gone. What is in use, new, or something else, stays."""
    names = ["modelrunner-00000001", "modelrunner-1000-00000002", "modelrunner-00000003", "modelrunner-other"]
    for name in names:
        (tmp_path / name).mkdir()
    with listening(tmp_path / names[0] / "dead.sock"):
        pass
    with listening(tmp_path / names[2] / "live.sock"):
        for name in names:
            os.utime(tmp_path / name, (0, 0))
        (tmp_path / "modelrunner-00000004").mkdir()
        instance.remove_abandoned(tmp_path / "modelrunner-00000005")
    assert sorted(os.listdir(tmp_path)) == ["modelrunner-00000003", "modelrunner-00000004", "modelrunner-other"]


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:80"])
def test_without_a_key_only_loopback_is_listened_on(listen: str) -> None:
    with pytest.raises(ConfigurationError, match="would open the daemon to others"):
        instance.bind_tcp(listen)


@pytest.mark.parametrize(
    "listen", ["12434", "localhost", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:65536", ":0", "example.com:80", "*:80"]
)
def test_an_address_that_is_none_is_said_so(listen: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is no (IP )?address"):
        instance.bind_tcp(listen)


def test_no_listener_is_a_choice() -> None:
    assert instance.bind_tcp("") is None
    assert instance.address(None) == ""


def test_a_busy_port_names_the_way_out() -> None:
    first = instance.bind_tcp("localhost:0")
    assert first is not None
    with first:
        assert instance.address(first) == f"http://127.0.0.1:{first.getsockname()[1]}"
        with pytest.raises(AlreadyRunning, match="MODELRUNNER_LISTEN"):
            instance.bind_tcp(f"127.0.0.1:{first.getsockname()[1]}")


async def test_the_second_request_to_stop_does_not_wait() -> None:
    lifecycle = instance.Lifecycle()
    with lifecycle.on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(HUNG):
            await lifecycle.stop.wait()
            assert not lifecycle.hurry.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            await lifecycle.hurry.wait()


async def test_tls_on_tcp(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, tls="self-signed")
    trust = ssl.create_default_context(cafile=str(daemon.settings.data_dir / "tls" / "certificate.pem"))
    for path in ("/health", "/v1/models"):
        async with daemon.tcp.get(path, ssl=trust) as answer:
            assert answer.status == 200
    body = {"model": "smol", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with daemon.tcp.post("/v1/chat/completions", json=body, ssl=trust) as answer:
        assert (await answer.text()).endswith("data: [DONE]\n\n")
    pem = (daemon.settings.data_dir / "tls" / "certificate.pem").read_text()
    async with daemon.unix.get("/logs") as answer:
        assert sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest() in await answer.text()
