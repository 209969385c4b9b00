"""What llama-server counts about itself."""

import re

from modelrunner import Endpoint, control

_BATCHES = re.compile(rb"^llamacpp:n_decode_total (\S+)$", re.MULTILINE)
_LIMIT = 5.0  # seconds


async def batches(endpoint: Endpoint) -> float | None:
    """How many batches were computed so far. The loop that computes them answers this too: an engine that is stuck in
    one does not. None of an engine that does not count. Raises `OSError`, `ModelRunnerError`."""
    status, text = await control.fetch(endpoint, "GET", "/metrics", timeout=_LIMIT)
    found = _BATCHES.search(text) if status == 200 else None
    return float(found[1]) if found else None
