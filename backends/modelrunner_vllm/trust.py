"""Models that bring code along. vLLM has run such code although it was told not to (CVE-2026-22807, CVE-2026-27893), so
it is not asked to be careful: the files are looked at before it starts."""

from pathlib import Path

import msgspec

from modelrunner import BadRequest, Bundle

_CODE = (".py", ".so", ".pyc", ".pkl", ".pickle", ".bin", ".pt", ".pth")
_LONGEST = 16 << 20  # bytes of a JSON file that can be a configuration; tokenizer.json may be larger and names no code
_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines")


def check_no_code(bundle: Bundle) -> None:
    """Raises `BadRequest` that names the file."""
    for name, path in bundle.files.items():
        if name.lower().endswith(_CODE):
            raise _refused(f"the file {name}")
        if name.endswith(".json") and (key := _key_of_code(path)):
            raise _refused(f"{name} with `{key}`")


def _key_of_code(path: Path) -> str | None:
    if path.stat().st_size > _LONGEST:
        return None
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # an index, a list, or damaged: the engine says so
    return next((key for key in _KEYS if key in content), None)


def _refused(what: str) -> BadRequest:
    return BadRequest(
        f"the model brings code of its own ({what}), which is not run: choose another model, or, if you trust it with "
        "all that this account may do, set trust_remote_code = true in [backends.vllm] of the configuration",
        param="model",
    )
