"""The engines that this release installs: exact versions, here and in the locks beside (scripts/lock writes those)."""

from pathlib import Path

VERSION = "0.32.0"
# The CPU build of torch is on an index of PyTorch's own, whose files the locks cannot name: the version is pinned and
# the index is trusted.
TORCH_CPU = "2.13.0+cpu"
LOCKS = Path(__file__).with_name("locks")
