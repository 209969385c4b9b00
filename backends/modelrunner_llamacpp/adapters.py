"""LoRA adapters of a run. A request may give each of them another strength."""

from modelrunner.sdk import BadRequest, RunSpec

_SEPARATORS = (",", ":", '"')


def check(spec: RunSpec) -> None:
    """Raises `BadRequest` for an adapter in a path that cannot be written into `--lora-scaled FILE:SCALE,...`."""
    for adapter in spec.bundle.adapters:
        if any(sign in str(adapter.path) for sign in _SEPARATORS):
            raise BadRequest(
                f"llama.cpp takes no LoRA adapter whose path has a comma, a colon or a quotation mark: rename "
                f"{adapter.path}",
                param="lora",
            )


def options(spec: RunSpec) -> dict[str, str]:
    """Returns the options that load the adapters, each at its scale."""
    if not spec.bundle.adapters:
        return {}
    return {"--lora-scaled": ",".join(f"{adapter.path}:{adapter.scale:g}" for adapter in spec.bundle.adapters)}
