"""The engine of modelrunner_bytes.py again, as a value."""

from modelrunner_bytes import API, BYTES, PROGRAM, SHIFT

from modelrunner.sdk.command import CommandBackend


class BytesByValue(CommandBackend):
    name = "bytes-by-value"
    formats = frozenset({SHIFT})
    modes = frozenset({BYTES})
    uses_tcp = True
    command = (*PROGRAM, "{port}", "{model}")
    engine_api = API
