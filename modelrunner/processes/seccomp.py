"""Makes the filter of an engine's system calls: classic BPF over `struct seccomp_data` (Linux,
Documentation/userspace-api/seccomp_filter.rst). It holds what Landlock does not know: sockets of other kinds than TCP,
connections to Unix sockets by their path, new processes, their groups and sessions, limits and priorities of other
processes, what stands beside the content of files (modes, owners, times, attributes), System V's IPC, and the kernel's
keyrings."""

import ctypes
import errno
import platform
import struct
import sys
from dataclasses import dataclass
from functools import cache

_LOAD, _AND = 0x20, 0x54  # BPF_LD|BPF_W|BPF_ABS, BPF_ALU|BPF_AND|BPF_K
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45  # BPF_JMP|BPF_K with BPF_JEQ, BPF_JGE, BPF_JSET
_RETURN, _ALLOW, _ERROR = 0x06, 0x7FFF0000, 0x00050000  # BPF_RET, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`; both machines are little-endian
_X32 = 0x40000000  # numbers of x86's other ABI begin here
_PR_SET_PDEATHSIG, _PR_GET_SECCOMP = 1, 21

_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_TYPE_MASK, _STREAM, _DATAGRAM, _PACKETS = 0xF, 1, 2, 5  # SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET
_MULTIPATH, _TCP, _UPPER_LAYER = 262, 6, 31  # IPPROTO_MPTCP, IPPROTO_TCP, TCP_ULP (of SMC): TCP, but not for Landlock
_FAST_OPEN = 0x20000000  # MSG_FASTOPEN: connects without connect(2)
_RLIMIT_LOCKS = 10  # the engine's mark (guardian.py)
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1
_NORMAL = 0  # SCHED_OTHER, without SCHED_RESET_ON_FORK
_F_SETLEASE = 1024
_FILE_IOCTLS = (  # FS_IOC_SETFLAGS, FS_IOC_SETVERSION, FS_IOC_FSSETXATTR, FS_IOC_ENABLE_VERITY: by who may only read
    *(0x40086602, 0x40087602, 0x401C5820, 0x40806685),
)
_THREAD, _NAMESPACES = 0x00010000, 0x7E020000  # CLONE_THREAD; CLONE_NEW*


@dataclass(frozen=True, slots=True)
class _CallNumbers:
    """`audit` is its AUDIT_ARCH_*; `numbers` are those of its system calls (asm/unistd_64.h, asm-generic/unistd.h)."""

    audit: int
    numbers: dict[str, int]


_COMMON = (
    {"io_uring_setup": 425, "clone3": 435, "fchmodat2": 452, "setxattrat": 463}  # sorted by number, as those below
    | {"getxattrat": 464, "listxattrat": 465, "removexattrat": 466, "file_setattr": 469}
)
_ABIS = {
    "x86_64": _CallNumbers(
        0xC000003E,
        _COMMON
        | {"ioctl": 16, "shmget": 29, "shmat": 30, "shmctl": 31, "socket": 41, "connect": 42, "sendto": 44}
        | {"sendmsg": 46, "socketpair": 53, "setsockopt": 54, "clone": 56, "fork": 57, "vfork": 58, "semget": 64}
        | {"semop": 65, "semctl": 66, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "fcntl": 72, "chmod": 90}
        | {"fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "setpgid": 109, "setsid": 112, "utime": 132}
        | {"setpriority": 141, "prctl": 157, "setrlimit": 160}
        | {"sched_setparam": 142, "sched_setscheduler": 144, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190}
        | {"getxattr": 191, "lgetxattr": 192, "listxattr": 194, "llistxattr": 195, "removexattr": 197}
        | {"lremovexattr": 198, "fremovexattr": 199, "sched_setaffinity": 203, "semtimedop": 220, "utimes": 235}
        | {"mq_open": 240, "mq_unlink": 241, "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251}
        | {"inotify_init": 253, "fchownat": 260, "futimesat": 261, "fchmodat": 268, "unshare": 272}
        | {"utimensat": 280, "inotify_init1": 294, "fanotify_init": 300, "prlimit64": 302, "sendmmsg": 307}
        | {"setns": 308, "sched_setattr": 314},
    ),
    "aarch64": _CallNumbers(
        0xC00000B7,
        _COMMON
        | {"setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "getxattr": 8, "lgetxattr": 9, "listxattr": 11}
        | {"llistxattr": 12, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "fcntl": 25}
        | {"inotify_init1": 26, "ioctl": 29, "ioprio_set": 30, "fchmod": 52, "fchmodat": 53, "fchownat": 54}
        | {"fchown": 55, "utimensat": 88, "unshare": 97, "sched_setparam": 118, "sched_setscheduler": 119}
        | {"sched_setaffinity": 122, "setpriority": 140, "setpgid": 154, "setsid": 157, "setrlimit": 164, "prctl": 167}
        | {"mq_open": 180, "mq_unlink": 181, "msgget": 186}
        | {"msgctl": 187, "msgrcv": 188, "msgsnd": 189, "semget": 190, "semctl": 191, "semtimedop": 192}
        | {"semop": 193, "shmget": 194, "shmctl": 195, "shmat": 196, "socket": 198, "socketpair": 199}
        | {"connect": 203, "sendto": 206, "setsockopt": 208, "sendmsg": 211, "add_key": 217, "request_key": 218}
        | {"keyctl": 219, "clone": 220, "prlimit64": 261, "fanotify_init": 262, "setns": 268, "sendmmsg": 269}
        | {"sched_setattr": 274},
    ),
}
_REFUSED = {
    errno.EPERM: (
        *("add_key", "request_key", "keyctl", "unshare", "setns", "fanotify_init"),
        *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
        *("utime", "utimes", "futimesat", "utimensat", "file_setattr", "setxattr", "lsetxattr", "fsetxattr"),
        *("setxattrat", "removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
    ),
    errno.EOPNOTSUPP: ("getxattr", "lgetxattr", "getxattrat", "listxattr", "llistxattr", "listxattrat"),
    errno.ENOSYS: (
        *("io_uring_setup", "clone3"),  # their ways cannot be seen here
        *("shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd", "msgrcv"),
        *("msgctl", "mq_open", "mq_unlink", "inotify_init", "inotify_init1"),
    ),
}


@cache
def supported() -> bool:
    """Returns whether this kernel filters system calls, and whether we know the machine's numbers."""
    known = sys.platform == "linux" and platform.machine() in _ABIS
    return known and ctypes.CDLL(None).prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) == 0


@cache
def program(*, listens_on_tcp: bool, network: bool, processes: bool, affinity: bool, scheduling: bool) -> bytes:
    """Returns the filter, an array of `struct sock_filter`. A refused call fails with EACCES or EPERM; where
    programs have another way, with ENOSYS or EOPNOTSUPP. Only where `supported`."""
    machine = _ABIS[platform.machine()]
    code = [
        *(_load(_MACHINE), _step(_EQUAL, machine.audit, 1, 0), _refuse(errno.ENOSYS)),
        *(_load(_NUMBER), _step(_AT_LEAST, _X32, 0, 1), _refuse(errno.ENOSYS)),
    ]
    rules = _network_rules(listens_on_tcp, network) | _process_rules(processes) | _rules_of_ids(affinity, scheduling)
    rules |= {"fcntl": _but(1, _F_SETLEASE), "ioctl": _but(1, *_FILE_IOCTLS)}
    rules |= {name: [_refuse(error)] for error, names in _REFUSED.items() for name in names}
    for name, rule in rules.items():
        if name in machine.numbers:
            code += [_step(_EQUAL, machine.numbers[name], 0, len(rule)), *rule]
    return b"".join([*code, _allow()])


def _network_rules(listens_on_tcp: bool, network: bool) -> dict[str, list[bytes]]:
    fast_open = {
        name: [_argument(flags), _step(_ANY_BIT, _FAST_OPEN, 0, 1), _refuse(errno.EACCES), _allow()]
        for name, flags in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3))
    }
    # Not by ways on which Landlock does not see a port that it closes.
    plain = [_argument(2), _step(_EQUAL, _MULTIPATH, 0, 1), _refuse(errno.EPROTONOSUPPORT)]
    if network:
        layer = [_argument(2), _step(_EQUAL, _UPPER_LAYER, 0, 1), _refuse(errno.ENOPROTOOPT), _allow()]
        return fast_open | {
            "socket": [*plain, *_family(_UNIX, _INET, _INET6, _NETLINK)],
            "setsockopt": [_argument(1), _step(_EQUAL, _TCP, 1, 0), _allow(), *layer],
        }
    families = (_UNIX, _INET, _INET6) if listens_on_tcp else (_UNIX,)
    # CUDA listens on an abstract socket of packets in each process that uses it, and fails where it cannot; it needs
    # memfd_create(2), too. An INET socket of packets would be SCTP, which Landlock does not see.
    packets = _family(_UNIX)
    kind = [_step(_EQUAL, _STREAM, 2 + len(packets), 0), _step(_EQUAL, _PACKETS, 1, 0), _refuse(errno.EACCES)]
    return fast_open | {
        "socket": [*plain, _argument(1), _mask(_TYPE_MASK), *kind, *packets, *_family(*families)],
        "socketpair": [
            *(_argument(1), _mask(_TYPE_MASK), _step(_EQUAL, _DATAGRAM, 0, 1), _refuse(errno.EACCES), _allow())
        ],
        "connect": [_refuse(errno.EACCES)],
    }


def _process_rules(processes: bool) -> dict[str, list[bytes]]:
    if processes:
        return {"clone": [_argument(0), _step(_ANY_BIT, _NAMESPACES, 0, 1), _refuse(errno.EPERM), _allow()]}
    thread = [_argument(0), _step(_ANY_BIT, _THREAD, 1, 0), _refuse(errno.EPERM), _allow()]
    refused = {name: [_refuse(errno.EPERM)] for name in ("fork", "vfork", "setpgid", "setsid")}
    return refused | {"clone": thread, "prctl": _but(0, _PR_SET_PDEATHSIG)}


def _rules_of_ids(affinity: bool, scheduling: bool) -> dict[str, list[bytes]]:
    """A filter sees numbers, and does not know the IDs of the engine's own processes and threads. So a call that takes
    one may only say 0: "who calls"."""
    names = ("sched_setparam", "sched_setscheduler", "sched_setattr")
    rules = {name: _only(0, 0) for name in (names if affinity else (*names, "sched_setaffinity"))} | {
        "setrlimit": _but(0, _RLIMIT_LOCKS),
        "prlimit64": [*_check(0, 0), *_but(1, _RLIMIT_LOCKS)],
        "setpriority": [*_check(0, _PRIO_PROCESS), *_only(1, 0)],
        "ioprio_set": [*_check(0, _IOPRIO_WHO_PROCESS), *_only(1, 0)],
    }
    if scheduling:
        rules["sched_setscheduler"] = [_argument(1), _step(_EQUAL, _NORMAL, 0, 1), _allow(), *_only(0, 0)]
    return rules


def _family(*families: int) -> list[bytes]:
    """The end of the rule for socket(2)."""
    jumps = [_step(_EQUAL, family, len(families) - place, 0) for place, family in enumerate(families)]
    return [_argument(0), *jumps, _refuse(errno.EACCES), _allow()]


def _check(argument: int, value: int) -> list[bytes]:
    """The begin of a rule that refuses other values."""
    return [_argument(argument), _step(_EQUAL, value, 1, 0), _refuse(errno.EPERM)]


def _only(argument: int, value: int) -> list[bytes]:
    return [*_check(argument, value), _allow()]


def _but(argument: int, *values: int) -> list[bytes]:
    """A rule that refuses these values."""
    jumps = [_step(_EQUAL, value, len(values) - place, 0) for place, value in enumerate(values)]
    return [_argument(argument), *jumps, _allow(), _refuse(errno.EPERM)]


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; a jump skips `then` or `otherwise` instructions."""
    return struct.pack("=HBBI", code, then, otherwise, value)


def _load(offset: int) -> bytes:
    return _step(_LOAD, offset)


def _argument(number: int) -> bytes:
    """The low half: all the arguments here are ints, or flags that have no higher bits."""
    return _load(_FIRST_ARGUMENT + 8 * number)


def _mask(bits: int) -> bytes:
    return _step(_AND, bits)


def _refuse(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _allow() -> bytes:
    return _step(_RETURN, _ALLOW)
