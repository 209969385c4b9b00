"""The HTTP interface of an engine as one value, which its backend returns for a run (`Backend.api`)."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from modelrunner.types import Mode

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ApiShape(StrEnum):
    """The form of an endpoint's requests and answers: what the daemon may read and change there."""

    CHAT = "chat"  # OpenAI's chat completions
    COMPLETION = "completion"  # OpenAI's completions
    MESSAGES = "messages"  # Anthropic's messages
    MESSAGE_COUNT = "message-count"  # the same request; the answer counts its tokens
    TEMPLATE = "template"  # the request of a chat; the answer is the prompt that the model would get
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    SCORE = "score"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    SPEECH = "speech"
    TRANSCRIPTION = "transcription"
    IMAGE = "image"
    OPAQUE = "opaque"  # the body passes as it is, whatever it is


@dataclass(frozen=True, slots=True)
class EndpointApi:
    """One endpoint of an engine."""

    shape: ApiShape
    reads: frozenset[str] | None = None
    """The names of all fields of a request that the engine reads; None if it may read every field. The answer names
    others in `X-Modelrunner-Ignored`, or the request is refused where the answer would mean something else."""
    as_stream: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """The fields that ask for a stream, and for everything in the plain answer. They are set for a client that wants a
    plain answer, where the engine notices only in a stream, or sooner there, that a client has left; the daemon then
    assembles the answer. Empty for an engine that is asked as the client asks."""
    chooses_by_word: bool = False
    """True if the engine takes words alone for `tool_choice`, and calls any tool where an object names one. The daemon
    then offers it that tool alone, and requires a call."""
    prose_before_calls: bool = False
    """True for chats of an engine that lets any text stand before a required call of a tool, so that a weak model never
    comes to one. The daemon then asks it for the calls as JSON of a schema. Such an endpoint has an `as_stream`."""
    choices_by_sequence: bool = False
    """True if a request for more choices (`n`) than the run has sequences is refused. The daemon then asks for them in
    several requests, one after another. Such an endpoint has an `as_stream`."""
    unheld: frozenset[str] = frozenset()
    """Keywords of JSON schemas that the grammars of the engine ignore in silence. With any, patterns are written as
    llama.cpp's grammars take them. Empty for an engine that holds schemas whole, or refuses them."""
    lacks_text: bool = False
    """True for transcriptions of an engine that refuses the `response_format` "text". The daemon then asks it for JSON,
    and answers with the `text` of that."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The smallest request that proves that an engine serves."""

    path: str
    body: bytes


OPENAI_ENDPOINTS: Mapping[str, EndpointApi] = MappingProxyType(
    {
        "/v1/chat/completions": EndpointApi(ApiShape.CHAT),
        "/v1/completions": EndpointApi(ApiShape.COMPLETION),
        "/v1/embeddings": EndpointApi(ApiShape.EMBEDDINGS),
        "/v1/rerank": EndpointApi(ApiShape.RERANK),
        "/tokenize": EndpointApi(ApiShape.TOKENIZE),
        "/detokenize": EndpointApi(ApiShape.DETOKENIZE),
    }
)
"""The endpoints of an engine whose backend names none."""
MESSAGES_ENDPOINTS: Mapping[str, EndpointApi] = MappingProxyType(
    {
        "/v1/messages": EndpointApi(ApiShape.MESSAGES),
        "/v1/messages/count_tokens": EndpointApi(ApiShape.MESSAGE_COUNT),
    }
)
"""Anthropic's messages. They are translated to chats for an engine without these endpoints."""


@dataclass(frozen=True, slots=True)
class ServiceCall:
    """A call that a backend adds to the daemon's HTTP interface, for a mode of its own. An endpoint of the same path of
    its engine answers it."""

    mode: Mode
    shape: ApiShape = ApiShape.OPAQUE
    """`OPAQUE`, `TRANSCRIPTION`: the body passes as it comes, and the model is named by a form's part `model` or by the
    query (`?model=NAME`). With other shapes the body is a JSON object with a `model`."""
    text: str = "Asks an engine of a backend that was added."
    """Describes the call in the document of the interface."""


_PROBES: Mapping[Mode, Mapping[ApiShape, Mapping[str, Any]]] = {
    Mode.COMPLETION: {
        ApiShape.COMPLETION: {"prompt": "a", "max_tokens": 1},
        ApiShape.CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    },
    Mode.EMBEDDING: {ApiShape.EMBEDDINGS: {"input": "a"}},
    Mode.RERANKING: {ApiShape.RERANK: {"query": "a", "documents": ["a"]}},
}
"""Small requests that prove that an engine serves in a mode, the cheapest first."""


@dataclass(frozen=True, slots=True)
class EngineApi:
    """The interface of an engine. A wrong value raises `TypeError` or `ValueError` with the reason."""

    endpoints: Mapping[str, EndpointApi] = field(default_factory=lambda: OPENAI_ENDPOINTS)
    """The endpoints by their paths. A request for another one is refused with 501."""
    health: str | None = "/health"
    """The path that answers 200 once the engine is ready; None for one that is ready once it answers anything."""
    ready_line: str = ""
    """A text in a line of its log without which the engine is not ready; "" for an engine that logs none."""
    start_limit: float | None = None
    """The seconds after which a start has failed; None: it may take as long as it makes progress."""
    metrics: str | None = "/metrics"
    """The path of the engine's metrics in Prometheus' text format; None without them."""
    work: tuple[str, ...] = ()
    """The names of metrics whose sum changes with every computed batch. Without them only processor time distinguishes
    a long prompt from a hang."""
    probe: Probe | None = None
    """Sent only to an engine with open requests that has shown no sign of life for a while; None if there is none."""
    settled: str | None = None
    """A path that answers once the engine works for no request whose connection it has closed already; until then the
    places of these requests count as taken. None for an engine that closes a connection only when it has dropped the
    request."""
    fields: str | None = None
    """A path at which the ready engine itself tells the fields that its endpoints read (`EndpointApi.reads`): a JSON
    object with a list of names for each path. None if the backend knows them."""
    listens_elsewhere: bool = False
    """True if a process that the program did not start itself listens for it, such as that of a container: the daemon
    then cannot tell another program on its port from the engine."""
    checks_model: bool = False
    """True if the engine rejects unknown `model` names: it knows the model's references and its ID. The daemon then
    replaces any other name of the model by its first reference."""
    model_name: str = ""
    """The only name by which the engine knows its model; "" if `checks_model` says all."""
    no_tools: str = ""
    """Why the engine calls no tools in this run, with the remedy; "" if it does. The daemon then names `tools` among
    the ignored fields, or refuses a request that requires a call."""
    embedding_length: int | None = None
    """The only length of the engine's embeddings, 0 if it is not known: the daemon refuses other `dimensions`. None for
    an engine that reads the field."""
    lacks: frozenset[str] = frozenset()
    """Capabilities that models may have (`CAPABILITIES`) and that the engine does not serve, such as "audio"."""

    def __post_init__(self) -> None:
        for path, endpoint in dict(self.endpoints).items():
            if not isinstance(endpoint, EndpointApi):
                raise TypeError(f"the endpoint {path!r} must be an EndpointApi")
        probed = (self.probe.path,) if self.probe is not None else ()
        optional = [path for path in (self.health, self.metrics, self.settled, self.fields) if path is not None]
        for path in (*self.endpoints, *optional, *probed):
            if not isinstance(path, str) or not path.startswith("/") or not path.isascii() or not path.isprintable():
                raise ValueError(f"the path {path!r} must be printable ASCII that begins with /")
        if not isinstance(self.work, tuple) or not all(isinstance(name, str) for name in (*self.work, *self.lacks)):
            raise TypeError("`work` and `lacks` are names")

    @classmethod
    def openai(cls, mode: Mode, model: str) -> "EngineApi":
        """Returns OpenAI's API, of an engine that runs in `mode` and knows the model as `model`."""
        return cls().probed(mode, model)

    def probed(self, mode: Mode, model: str) -> "EngineApi":
        """Returns the interface with a probe of one of its endpoints, as it is if none of them has one in this mode."""
        for shape, fields in _PROBES.get(mode, {}).items():
            for path in self.paths_of(shape):
                return replace(self, probe=Probe(path, json.dumps({"model": model, **fields}).encode()))
        return self

    def reading(self, reads: Mapping[str, frozenset[str]]) -> "EngineApi":
        """Returns the interface with the fields that each of these endpoints reads."""
        known = {
            path: replace(endpoint, reads=reads[path]) if path in reads else endpoint
            for path, endpoint in self.endpoints.items()
        }
        return replace(self, endpoints=known)

    def reads(self, path: str) -> frozenset[str] | None:
        """Returns `EndpointApi.reads` of the endpoint; None for a path that the engine does not serve."""
        endpoint = self.endpoints.get(path)
        return endpoint.reads if endpoint is not None else None

    def as_stream(self, path: str) -> Mapping[str, Any]:
        """Returns `EndpointApi.as_stream` of the endpoint; nothing for a path that the engine does not serve."""
        endpoint = self.endpoints.get(path)
        return endpoint.as_stream if endpoint is not None else _NOTHING

    def paths_of(self, shape: ApiShape) -> Iterator[str]:
        """Yields the paths of the endpoints with this shape."""
        return (path for path, endpoint in self.endpoints.items() if endpoint.shape is shape)


OPENAI = EngineApi()
"""OpenAI's API without a probe."""
