"""Models that bring code along are in the store only if somebody at the command line trusted them when they were taken.
vLLM has to be told which of them those are; of all others it must not run anything, whatever it finds in them."""

from pathlib import Path

import msgspec

from modelrunner import Bundle

_CODE = (".py", ".pyc", ".so", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def carries_code(bundle: Bundle) -> bool:
    """Reads the bundle's configuration files."""
    return any(
        name.lower().endswith(_CODE) or (name.endswith("config.json") and _names_code(path))
        for name, path in bundle.files.items()
    )


def _names_code(path: Path) -> bool:
    try:
        content = msgspec.json.decode(path.read_bytes())
    except msgspec.MsgspecError:
        return False  # damaged, as the engine will say
    waiting = [content]
    while waiting:
        match waiting.pop():
            case {"auto_map": _}:
                return True
            case dict(members):
                waiting.extend(members.values())
            case list(entries):
                waiting.extend(entries)
    return False
