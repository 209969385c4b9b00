"""An engine that tries to get out: each name on its command line is an attempt, and each prints one line, `NAME held`
or `NAME got: what it got`. Standard library only. `--secrets`, `--data`, `--daemon` and `--listener` say where there is
something to get; with `--socket` it then serves as tests/fake_engine.py does."""

import argparse
import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

ATTEMPTS: dict[str, Callable[[argparse.Namespace], object]] = {}
LIBC = ctypes.CDLL(None, use_errno=True)
FORKS = 64
NUMBERS = {  # of system calls that have no function here (asm/unistd_64.h, asm-generic/unistd.h)
    "x86_64": {"keyctl": 250, "ioprio_set": 251, "move_pages": 279, "kcmp": 312, "sched_setattr": 314},
    "aarch64": {"keyctl": 219, "ioprio_set": 30, "move_pages": 239, "kcmp": 272, "sched_setattr": 274},
}[os.uname().machine] | {"io_uring_setup": 425, "pidfd_getfd": 438, "fchmodat2": 452}
GET_FLAGS, SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS


def attempt(function: Callable[[argparse.Namespace], object]) -> Callable[[argparse.Namespace], object]:
    ATTEMPTS[function.__name__] = function
    return function


def called(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def system_call(name: str, *arguments: object) -> int:
    return called(LIBC.syscall(NUMBERS[name], *arguments))


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
def follow_link(o: argparse.Namespace) -> object:
    """By a symbolic link in its own folder."""
    (o.folder / "link").symlink_to(o.secrets / "id_ed25519")
    return (o.folder / "link").read_text()


@attempt
def link_key(o: argparse.Namespace) -> object:
    """A second name, in its own folder, of a file outside."""
    os.link(o.secrets / "id_ed25519", o.folder / "key")
    return (o.folder / "key").read_text()


@attempt
def move_into_data(o: argparse.Namespace) -> None:
    (o.folder / "planted").write_text("x")
    os.rename(o.folder / "planted", o.data / "state.json")


@attempt
def connect_tcp(o: argparse.Namespace) -> object:
    return socket.create_connection(("127.0.0.1", o.listener), 5)


@attempt
def connect_fast_open(o: argparse.Namespace) -> object:
    return socket.socket().sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", o.listener))


@attempt
def connect_multipath(o: argparse.Namespace) -> None:
    socket.socket(proto=262).connect(("127.0.0.1", o.listener))  # IPPROTO_MPTCP


@attempt
def add_upper_layer(o: argparse.Namespace) -> bool:
    """SMC in place of TCP, where the kernel has it."""
    with socket.socket() as connection:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, 31, b"smc")  # TCP_ULP
        except FileNotFoundError:
            return False
        return True


@attempt
def listen_beside_daemon(o: argparse.Namespace) -> None:
    """Where a client may look for it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", o.listener))


@attempt
def send_udp(o: argparse.Namespace) -> object:
    return socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))


@attempt
def connect_unix(o: argparse.Namespace) -> None:
    socket.socket(socket.AF_UNIX).connect(str(o.data / "daemon.sock"))


@attempt
def connect_abstract(o: argparse.Namespace) -> None:
    socket.socket(socket.AF_UNIX).connect(f"\0{o.data}")


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
def read_memory(o: argparse.Namespace) -> object:
    return os.open(f"/proc/{o.daemon}/mem", os.O_RDONLY)


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
def take_off_mark(o: argparse.Namespace) -> object:
    return called(LIBC.setrlimit(10, struct.pack("QQ", 0, 0)))  # RLIMIT_LOCKS (processtree.py, lasting_mark)


@attempt
def leave_group(o: argparse.Namespace) -> None:
    """The guardian ends the group that it has made."""
    os.setpgid(0, os.getpgid(os.getppid()))


@attempt
def outlive_parent(o: argparse.Namespace) -> object:
    """The kernel ends an engine whose guardian was killed, unless it says otherwise."""
    return called(LIBC.prctl(1, 0, 0, 0, 0))


@attempt
def gain_privileges(o: argparse.Namespace) -> object:
    """A new user namespace, in which it would be root."""
    return called(LIBC.unshare(0x10000000))


@attempt
def read_keyring(o: argparse.Namespace) -> object:
    return system_call("keyctl", 0, -3, 1, 0, 0)


@attempt
def mount(o: argparse.Namespace) -> object:
    return called(LIBC.mount(b"none", str(o.folder).encode(), b"tmpfs", 0, None))


@attempt
def use_io_uring(o: argparse.Namespace) -> object:
    return system_call("io_uring_setup", 1, ctypes.create_string_buffer(120))


@attempt
def kill_daemon_by_input(o: argparse.Namespace) -> None:
    """The kernel sends the signal when a byte comes."""
    daemon = os.pidfd_open(o.daemon)
    read, write = os.pipe()
    fcntl.fcntl(read, fcntl.F_SETOWN, o.daemon)
    fcntl.fcntl(read, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
    os.write(write, b"x")
    if not select.select([daemon], [], [], 0.5)[0]:
        raise OSError("it did not end")


@attempt
def change_flags_of_model(o: argparse.Namespace) -> None:
    with open(o.data / "model.gguf", "rb") as model:
        fcntl.ioctl(model, SET_FLAGS, fcntl.ioctl(model, GET_FLAGS, bytes(8)))


@attempt
def lease_model(o: argparse.Namespace) -> None:
    """The next that opens the file waits for 45 s."""
    with open(o.data / "model.gguf", "rb") as model:
        fcntl.fcntl(model, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(model, fcntl.F_SETLEASE, fcntl.F_UNLCK)


@attempt
def watch_keys(o: argparse.Namespace) -> object:
    return called(LIBC.inotify_add_watch(called(LIBC.inotify_init1(0)), os.fsencode(o.secrets), 0x20))


@attempt
def share_memory(o: argparse.Namespace) -> None:
    called(LIBC.shmctl(called(LIBC.shmget(0, 4096, 0o600)), 0, None))


@attempt
def share_semaphores(o: argparse.Namespace) -> None:
    called(LIBC.semctl(called(LIBC.semget(0, 1, 0o600)), 0, 0))


@attempt
def share_messages(o: argparse.Namespace) -> None:
    called(LIBC.msgctl(called(LIBC.msgget(0, 0o600)), 0, None))


@attempt
def share_queue(o: argparse.Namespace) -> None:
    name = f"/intruder-{os.getpid()}".encode()
    called(LIBC.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None))
    called(LIBC.mq_unlink(name))


@attempt
def slow_account(o: argparse.Namespace) -> ProcessLookupError | None:
    """Harmless where it comes through: the account has no process, which the kernel finds out."""
    try:
        os.setpriority(os.PRIO_USER, 60123, 19)
    except ProcessLookupError as error:
        return error
    return None


# By the ID of a process. The kernel kills one that works longer than its limit.
ATTEMPTS |= {
    "limit_daemon": lambda o: resource.prlimit(o.daemon, resource.RLIMIT_CPU, (1, 1)),
    "read_limits_of_daemon": lambda o: resource.prlimit(o.daemon, resource.RLIMIT_CPU),
    "slow_daemon": lambda o: os.setpriority(os.PRIO_PROCESS, o.daemon, 19),
    "slow_group": lambda o: os.setpriority(os.PRIO_PGRP, 0, 19),
    "slow_disk_of_daemon": lambda o: system_call("ioprio_set", 1, o.daemon, 3 << 13),
    "schedule_daemon": lambda o: os.sched_setscheduler(o.daemon, os.SCHED_BATCH, os.sched_param(0)),
    "reset_class_of_daemon": lambda o: os.sched_setscheduler(o.daemon, os.SCHED_OTHER, os.sched_param(0)),
    "set_parameters_of_daemon": lambda o: os.sched_setparam(o.daemon, os.sched_param(0)),
    "set_attributes_of_daemon": lambda o: system_call("sched_setattr", o.daemon, struct.pack("I44x", 48), 0),
    "bind_daemon": lambda o: os.sched_setaffinity(o.daemon, os.sched_getaffinity(o.daemon)),
    "move_memory_of_daemon": lambda o: system_call("move_pages", o.daemon, 0, None, None, None, 0),
    "compare_with_daemon": lambda o: system_call("kcmp", os.getpid(), o.daemon, 0, 0, 0),
    "take_file_of_daemon": lambda o: system_call("pidfd_getfd", os.pidfd_open(o.daemon), 0, 0),
}

# What stands beside the content of files: of one outside by its path, of the model through a descriptor.
ATTEMPTS |= {
    "change_mode": lambda o: os.chmod(o.secrets / "id_ed25519", 0o777),
    "change_mode_of_data": lambda o: os.chmod(o.data, 0o777),
    "change_mode_by_new_call": lambda o: system_call("fchmodat2", -100, os.fsencode(o.data / "state.json"), 0o777, 0),
    "change_mode_of_model": lambda o: os.chmod(os.open(o.data / "model.gguf", os.O_RDONLY), 0o777),
    "change_owner": lambda o: os.chown(o.secrets / "id_ed25519", os.getuid(), os.getgid()),
    "change_owner_of_link": lambda o: os.lchown(o.secrets / "id_ed25519", os.getuid(), os.getgid()),
    "change_owner_of_model": lambda o: os.chown(os.open(o.data / "model.gguf", os.O_RDONLY), os.getuid(), os.getgid()),
    "change_times": lambda o: os.utime(o.secrets / "id_ed25519", (1, 1)),
    "change_times_of_model": lambda o: os.utime(os.open(o.data / "model.gguf", os.O_RDONLY), (1, 1)),
    "set_attribute": lambda o: os.setxattr(o.secrets / "id_ed25519", "user.planted", b"x"),
    "set_attribute_of_model": lambda o: os.setxattr(os.open(o.data / "model.gguf", os.O_RDONLY), "user.planted", b"x"),
    "remove_attribute": lambda o: os.removexattr(o.data / "state.json", "user.note"),
    "read_attribute": lambda o: os.getxattr(o.data / "state.json", "user.note"),
    "list_attributes": lambda o: os.listxattr(o.data / "state.json"),
}


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
