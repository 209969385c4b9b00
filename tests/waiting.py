"""How long a test waits for what must come, and what it waits for."""

import psutil

HUNG = 120.0
"""Seconds after which a wait has failed. A pass never takes them, and no promise is told by them: a busy machine may
need many of them for what takes none on an idle one."""


def has_ended(process: psutil.Process) -> bool:
    """True once nothing of it runs: nobody may have asked for its exit status yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
