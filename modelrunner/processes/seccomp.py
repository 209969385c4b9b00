"""Makes the filter of an engine's system calls: classic BPF over `struct seccomp_data` (Linux,
Documentation/userspace-api/seccomp_filter.rst). It holds what Landlock does not know: sockets of other kinds than TCP,
connections to Unix sockets by their path, new processes, and the kernel's keyrings."""

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
_PR_GET_SECCOMP = 21

_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_TYPE_MASK, _STREAM, _DATAGRAM = 0xF, 1, 2
_FAST_OPEN = 0x20000000  # MSG_FASTOPEN: connects without connect(2)
_THREAD, _NAMESPACES = 0x00010000, 0x7E020000  # CLONE_THREAD; CLONE_NEW*


@dataclass(frozen=True, slots=True)
class _CallNumbers:
    """`audit` is its AUDIT_ARCH_*; `numbers` are those of its system calls (asm/unistd_64.h, asm-generic/unistd.h)."""

    audit: int
    numbers: dict[str, int]


_COMMON = {"io_uring_setup": 425, "clone3": 435}
_ABIS = {
    "x86_64": _CallNumbers(
        0xC000003E,
        _COMMON
        | {"socket": 41, "connect": 42, "sendto": 44, "sendmsg": 46, "socketpair": 53, "clone": 56, "fork": 57}
        | {"vfork": 58, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "sendmmsg": 307}
        | {"setns": 308},
    ),
    "aarch64": _CallNumbers(
        0xC00000B7,
        _COMMON
        | {"unshare": 97, "socket": 198, "socketpair": 199, "connect": 203, "sendto": 206, "sendmsg": 211}
        | {"add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220, "setns": 268, "sendmmsg": 269},
    ),
}


@cache
def supported() -> bool:
    """Returns whether this kernel filters system calls, and whether we know the machine's numbers."""
    known = sys.platform == "linux" and platform.machine() in _ABIS
    return known and ctypes.CDLL(None).prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) == 0


@cache
def program(*, listens_on_tcp: bool, network: bool, processes: bool) -> bytes:
    """Returns the filter, an array of `struct sock_filter`. A refused call fails with EACCES or EPERM; where
    programs have another way, with ENOSYS. Only where `supported`."""
    machine = _ABIS[platform.machine()]
    code = [
        *(_load(_MACHINE), _step(_EQUAL, machine.audit, 1, 0), _refuse(errno.ENOSYS)),
        *(_load(_NUMBER), _step(_AT_LEAST, _X32, 0, 1), _refuse(errno.ENOSYS)),
    ]
    rules = {name: [_refuse(errno.EPERM)] for name in ("add_key", "request_key", "keyctl", "unshare", "setns")}
    rules |= {name: [_refuse(errno.ENOSYS)] for name in ("io_uring_setup", "clone3")}  # their ways cannot be seen here
    if processes:
        rules["clone"] = [_argument(0), _step(_ANY_BIT, _NAMESPACES, 0, 1), _refuse(errno.EPERM), _allow()]
    else:
        rules["clone"] = [_argument(0), _step(_ANY_BIT, _THREAD, 1, 0), _refuse(errno.EPERM), _allow()]
        rules |= {"fork": [_refuse(errno.EPERM)], "vfork": [_refuse(errno.EPERM)]}
    if network:
        rules["socket"] = _family(_UNIX, _INET, _INET6, _NETLINK)
    else:
        families = (_UNIX, _INET, _INET6) if listens_on_tcp else (_UNIX,)
        stream = [_argument(1), _mask(_TYPE_MASK), _step(_EQUAL, _STREAM, 1, 0), _refuse(errno.EACCES)]
        rules["socket"] = [*stream, *_family(*families)]
        rules["socketpair"] = [
            *(_argument(1), _mask(_TYPE_MASK), _step(_EQUAL, _DATAGRAM, 0, 1), _refuse(errno.EACCES), _allow())
        ]
        rules["connect"] = [_refuse(errno.EACCES)]
        for name, flags in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
            rules[name] = [_argument(flags), _step(_ANY_BIT, _FAST_OPEN, 0, 1), _refuse(errno.EACCES), _allow()]
    for name, rule in rules.items():
        if name in machine.numbers:
            code += [_step(_EQUAL, machine.numbers[name], 0, len(rule)), *rule]
    return b"".join([*code, _allow()])


def _family(*families: int) -> list[bytes]:
    """The end of the rule for socket(2)."""
    jumps = [_step(_EQUAL, family, len(families) - place, 0) for place, family in enumerate(families)]
    return [_argument(0), *jumps, _refuse(errno.EACCES), _allow()]


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
