"""How long a test waits for what must come."""

HUNG = 120.0
"""Seconds after which a wait has failed. A pass never takes them, and no promise is told by them: a busy machine may
need many of them for what takes none on an idle one."""
