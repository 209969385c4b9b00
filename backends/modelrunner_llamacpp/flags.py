"""Which runtime flags of llama.cpp a person may give."""

from modelrunner.flags import AllowList, words_of
from modelrunner_llamacpp.options import ALLOWED, ALSO_OWNED, OPTIONS, OWNED

# Spellings that llama-server had before --load-mode, and that people still type.
_SHORTHANDS = {"--mlock": ("--load-mode", "mmap+mlock"), "--no-mmap": ("--load-mode", "none")}

parse = AllowList("llama.cpp", ALLOWED, owned=OWNED, also_owned=ALSO_OWNED, shorthands=_SHORTHANDS).parse

# Flags that say what a field of every model's configuration says.
_FIELDS = {"--ctx-size": "context_size", "--parallel": "parallel", "--n-gpu-layers": "gpu_layers"}
_LAYERS = {"auto": None, "all": 10_000}  # more layers than any model has


def fold(flags: tuple[str, ...]) -> tuple[dict[str, int | None], tuple[str, ...]]:
    """See `Backend.fold_flags`; the flags that remain are spelled out. Raises `BadRequest` as `parse` does."""
    parsed = parse(flags)
    found = {
        field: _LAYERS[text] if text in _LAYERS else int(text)
        for flag, field in _FIELDS.items()
        if (text := parsed.pop(flag, None)) is not None
    }
    if not found:
        return {}, flags
    return found, tuple(word for flag, text in parsed.items() for word in words_of(OPTIONS[flag], text))
