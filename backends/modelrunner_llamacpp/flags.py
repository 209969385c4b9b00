"""Which runtime flags of llama.cpp a person may give."""

from modelrunner.flags import AllowList
from modelrunner_llamacpp.options import ALLOWED, ALSO_OWNED, OWNED

# Spellings that llama-server had before --load-mode, and that people still type.
_SHORTHANDS = {"--mlock": ("--load-mode", "mmap+mlock"), "--no-mmap": ("--load-mode", "none")}

parse = AllowList("llama.cpp", ALLOWED, owned=OWNED, also_owned=ALSO_OWNED, shorthands=_SHORTHANDS).parse
