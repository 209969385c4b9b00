"""Fields of requests that the owner of a model removes, or sets."""

import json
from pathlib import Path

import pytest

from modelrunner.config.modelconfig import ModelConfiguration
from modelrunner.defaults import RequestParameters
from modelrunner.errors import BadRequest
from modelrunner.types import RequestLimits
from tests.gateway.harness import proxy, request


async def test_every_request_of_the_model_has_them(folder: Path) -> None:
    async with proxy(folder, "tcp") as served:
        served.scheduler.parameters = RequestParameters(("seed", "top_p"), {"temperature": 0.2, "stop": ["x"]})
        given = {"model": "m", "messages": [], "seed": 3, "top_p": 0.5, "temperature": 1.5, "top_k": 7}
        await served.ask(request(body=given))
        sent = json.loads(served.engine.received[0].body)
        assert sent == {"model": "m", "messages": [], "temperature": 0.2, "stop": ["x"], "top_k": 7}

        served.scheduler.parameters = RequestParameters((), {"max_tokens": 1000})
        served.scheduler.limits = RequestLimits(tokens=10)
        await served.ask(request())
        assert json.loads(served.engine.received[1].body)["max_tokens"] == 10


@pytest.mark.parametrize(
    "given",
    [
        {"strip": ["model"]},
        {"set": {"messages": []}},
        {"set": {"stream": False}},
        {"strip": [""]},
        {"strip": "seed"},
        {"set": ["a"]},
        {"sett": {}},
        {"strip": ["x"] * 65},
    ],
)
def test_what_the_daemon_itself_reads_cannot_change(given: dict[str, object]) -> None:
    with pytest.raises(BadRequest) as refused:
        ModelConfiguration.of({"parameters": given})
    assert "parameters" in str(refused.value.param)
