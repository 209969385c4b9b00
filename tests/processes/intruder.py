"""An engine that tries to get out: each name on its command line is an attempt, and each prints one line, `NAME held`
or `NAME got: what it got`. Standard library only. `--secrets`, `--data`, `--daemon` and `--listener` say where there is
something to get; with `--socket` it then serves as tests/fake_engine.py does."""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

ATTEMPTS: dict[str, Callable[[argparse.Namespace], object]] = {}
LIBC = ctypes.CDLL(None, use_errno=True)
FORKS = 64


def attempt(function: Callable[[argparse.Namespace], object]) -> Callable[[argparse.Namespace], object]:
    ATTEMPTS[function.__name__] = function
    return function


def called(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


@attempt
def read_keys(o: argparse.Namespace) -> object:
    return (o.secrets / "id_ed25519").read_text()


@attempt
def list_keys(o: argparse.Namespace) -> object:
    return os.listdir(o.secrets)


@attempt
def write_data(o: argparse.Namespace) -> object:
    return (o.data / "planted").write_text("x")


@attempt
def change_data(o: argparse.Namespace) -> object:
    return os.open(o.data / "state.json", os.O_WRONLY)


@attempt
def truncate_data(o: argparse.Namespace) -> None:
    os.truncate(o.data / "state.json", 0)


@attempt
def remove_data(o: argparse.Namespace) -> None:
    os.unlink(o.data / "state.json")


@attempt
def change_model(o: argparse.Namespace) -> object:
    return os.open(o.data / "model.gguf", os.O_WRONLY)


@attempt
def connect_tcp(o: argparse.Namespace) -> object:
    return socket.create_connection(("127.0.0.1", o.listener), 5)


@attempt
def connect_fast_open(o: argparse.Namespace) -> object:
    return socket.socket().sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", o.listener))


@attempt
def send_udp(o: argparse.Namespace) -> object:
    return socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))


@attempt
def connect_unix(o: argparse.Namespace) -> None:
    socket.socket(socket.AF_UNIX).connect(str(o.data / "daemon.sock"))


@attempt
def send_unix(o: argparse.Namespace) -> object:
    pair, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return pair.sendto(b"x", str(o.data / "log.sock"))


@attempt
def listen_elsewhere(o: argparse.Namespace) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))


@attempt
def trace_daemon(o: argparse.Namespace) -> object:
    return called(LIBC.ptrace(16, o.daemon, 0, 0))  # PTRACE_ATTACH


@attempt
def read_environment(o: argparse.Namespace) -> object:
    return Path(f"/proc/{o.daemon}/environ").read_bytes()


@attempt
def read_through_daemon(o: argparse.Namespace) -> object:
    return Path(f"/proc/{o.daemon}/root{o.secrets}/id_ed25519").read_text()


@attempt
def kill_daemon(o: argparse.Namespace) -> None:
    os.kill(o.daemon, signal.SIGCONT)  # harmless where it comes through


@attempt
def kill_guardian(o: argparse.Namespace) -> None:
    os.kill(os.getppid(), signal.SIGCONT)


@attempt
def fork(o: argparse.Namespace) -> object:
    """Every child that comes to be forks in its turn."""
    for _ in range(FORKS):
        if os.fork() == 0:
            os.pause() if hasattr(os, "pause") else signal.pause()
    return FORKS


@attempt
def spawn(o: argparse.Namespace) -> object:
    return subprocess.run(["/bin/true"], check=True)


@attempt
def gain_privileges(o: argparse.Namespace) -> object:
    """A new user namespace, in which it would be root."""
    return called(LIBC.unshare(0x10000000))


@attempt
def read_keyring(o: argparse.Namespace) -> object:
    return called(LIBC.syscall({"x86_64": 250}.get(os.uname().machine, 219), 0, -3, 1, 0, 0))


@attempt
def mount(o: argparse.Namespace) -> object:
    return called(LIBC.mount(b"none", str(o.folder).encode(), b"tmpfs", 0, None))


@attempt
def use_io_uring(o: argparse.Namespace) -> object:
    return called(LIBC.syscall(425, 1, ctypes.create_string_buffer(120)))


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("attempts", nargs="*")
    for name in ("secrets", "data", "folder"):
        p.add_argument(f"--{name}", type=Path)
    for name in ("daemon", "listener"):
        p.add_argument(f"--{name}", type=int)
    o = p.parse_args()
    for name in o.attempts or ATTEMPTS:
        try:
            got = ATTEMPTS[name](o)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{name} held: {error}", flush=True)
        else:
            print(f"{name} got: {got!r}", flush=True)
    # What an engine needs still works.
    (o.folder / "cache").write_text("x")
    threading.Thread(target=lambda: print("thread works", flush=True)).start()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(o.folder / "own.sock"))
        listener.listen()
    print(f"reads its model: {(o.data / 'model.gguf').read_text()}", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
