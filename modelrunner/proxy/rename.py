"""The model's name in a body, for engines that refuse a name which they were not started with."""

import msgspec

from modelrunner.runner import Runner

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def body_for(runner: Runner, model: str, body: bytes) -> bytes:
    """`body`, in which `model` was found, as this runner's engine takes it: the same bytes wherever it knows the name,
    else with the engine's own name for the model; the other members stay as they were written."""
    if runner.names is None or model in runner.names:
        return body
    members = _MEMBERS.decode(body)
    members["model"] = msgspec.Raw(msgspec.json.encode(runner.names[0]))
    return msgspec.json.encode(members)
