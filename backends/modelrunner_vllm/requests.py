"""The fields that vLLM reads in a request, and the end of its work for a request."""

from modelrunner.sdk import BackendUnavailable, Endpoint, calls

_FIELDS_LIMIT = 5.0  # seconds
_STEP_LIMIT = 50.0  # seconds: a step with a long prompt takes a slow processor that long


async def settled(endpoint: Endpoint) -> None:
    """Does as `Backend.settled` should. The guard inside the API server answers (inside/modelrunner_guard.py)."""
    status, _ = await calls.fetch(endpoint, "GET", "/modelrunner/settled", timeout=_STEP_LIMIT)
    if status != 204:
        raise BackendUnavailable(f"vLLM answered {status} when asked what it still works on")


async def request_fields(endpoint: Endpoint) -> dict[str, list[str]]:
    """Does as `Backend.request_fields` should. The guard inside the API server reads them from vLLM's own models of a
    request."""
    status, told = await calls.ask(endpoint, "GET", "/modelrunner/fields", timeout=_FIELDS_LIMIT)
    if status != 200 or not isinstance(told, dict):
        raise BackendUnavailable(f"vLLM answered {status} when asked which fields it reads")
    return told
