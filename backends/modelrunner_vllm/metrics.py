"""What vLLM counts about itself (vllm/v1/metrics/loggers.py)."""

import re

from modelrunner import Endpoint, control

# Batches from which an answer got something, and the share of the cache in use, 0 to 1: of a long prompt that is
# computed in pieces only the second moves before the last one.
_FIGURES = re.compile(rb"^vllm:(?:iteration_tokens_total_count|kv_cache_usage_perc)\{[^}]*\} (\S+)$", re.MULTILINE)
_LIMIT = 5.0  # seconds


async def work(endpoint: Endpoint) -> float | None:
    """A figure that changes with every batch. The API server answers this, while another process computes: an engine
    that is stuck tells the same figure again. None if it tells none. Raises `OSError`, `ModelRunnerError`."""
    status, text = await control.fetch(endpoint, "GET", "/metrics", timeout=_LIMIT)
    found = _FIGURES.findall(text) if status == 200 else []
    return sum(map(float, found)) if found else None
