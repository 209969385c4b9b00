"""Names of files inside a bundle. A name in a manifest becomes a name on disk, so only these are accepted."""

import re

PROJECTOR = "mmproj.gguf"
TEMPLATE = "chat_template.jinja"
CONFIG = "config.json"
WEIGHTS = ".safetensors"
INDEX = "model.safetensors.index.json"

# A folder as Hugging Face's libraries write it. sentence-transformers has a folder for each module: 1_Pooling.
_FOLDER = re.compile(
    r"(?:(?:[0-9]{1,2}_[A-Za-z]{1,40}|additional_chat_templates)/)?"
    r"[A-Za-z0-9_][A-Za-z0-9._-]{0,120}\.(?:safetensors|json|jinja|txt|model|tiktoken|py)"
)
# Suffixes of files that run as code when they are loaded: modules, pickles, libraries.
_CODE = (".py", ".pyc", ".pyd", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".so", ".dylib", ".dll")


def in_folder(name: str) -> bool:
    """Returns whether `name` is a relative path that a file of a safetensors model may have."""
    return _FOLDER.fullmatch(name) is not None


def is_code(name: str) -> bool:
    return name.lower().endswith(_CODE)
