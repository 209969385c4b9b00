"""The HTTP interface of vLLM's server."""

from dataclasses import replace

from modelrunner.sdk import MESSAGES_ENDPOINTS, OPENAI_ENDPOINTS, ApiShape, EndpointApi, EngineApi, RunSpec

_ENDPOINTS = {**OPENAI_ENDPOINTS, **MESSAGES_ENDPOINTS, "/score": EndpointApi(ApiShape.SCORE)}
# The number of batches that gave an answer something, and the share of the cache in use, 0 to 1. While a long prompt is
# computed in pieces, only the share moves before the last piece. The API server answers while another process computes,
# so a stuck engine reports the same figures again.
_WORK = ("vllm:iteration_tokens_total_count", "vllm:kv_cache_usage_perc")


def api(spec: RunSpec) -> EngineApi:
    """Returns the interface. The guard inside the API server (inside/modelrunner_guard.py) answers at the paths of
    `settled` and `fields`; it reads the fields from vLLM's own models of a request. It hears nothing, because the
    packages that read sound are not installed: they take 250 MB, and no model here needs them."""
    return replace(
        EngineApi.openai(spec.mode, spec.bundle.name),
        endpoints=_ENDPOINTS,
        work=_WORK,
        settled="/modelrunner/settled",
        fields="/modelrunner/fields",
        checks_model=True,
        lacks=frozenset({"audio"}),
    )
