"""What Ollama does with a request that is longer than the model's window: it drops the oldest messages of a chat but
the system's, and cuts a text. It counts tokens first; here the engine's refusal says how much is too much.

Source of the rules: https://github.com/ollama/ollama/blob/main/server/prompt.go and server/routes.go.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from modelrunner.engine.runner import Runner
from modelrunner.errors import ContextTooLong, EngineProtocolError
from modelrunner.gateway.calls import Inference
from modelrunner.gateway.dialects.ollama_request import (
    ChatFields,
    CutEmbedFields,
    EmbedFields,
    GenerateFields,
    OllamaMessage,
)

_EMBEDDINGS, _TOKENIZE = "/v1/embeddings", "/tokenize"
_CUTS = "truncate_prompt_tokens"  # vLLM cuts by itself
_ANSWER = 4  # a quarter of the window is left for an answer whose length is open
_SPARE = 1.05  # tokens are not as long everywhere: a text is cut by this much more
_MOST_TRIES = 20
_TOKENIZING = 30.0  # seconds


async def shortened(ask: Inference, runner: Runner, error: ContextTooLong) -> Inference | None:
    """Returns the request that fits better, with what it lost in `lost`; None if nothing more can go."""
    match ask.fields:
        case EmbedFields(cut=False) as embed if embed.truncate is not False:
            return await _cut_embedding(ask, embed, runner, error)
        case ChatFields() as chat if chat.truncate is not False and ask.tries < _MOST_TRIES:
            return _shorter_chat(ask, chat, error)
        case GenerateFields() as generate if generate.truncate is not False and ask.tries < _MOST_TRIES:
            if generate.context:
                return _with(ask, ("context",), context=None)
            prompt = _cut(generate.prompt or "", _excess(generate, error), len(generate.prompt or ""))
            return _with(ask, ("prompt",), prompt=prompt) if prompt else None
    return None


def _with(ask: Inference, lost: Sequence[str], **fields: Any) -> Inference:
    changed = msgspec.structs.replace(ask.fields, **fields)
    return msgspec.structs.replace(ask, fields=changed, lost=(*ask.lost, *lost), tries=ask.tries + 1)


def _excess(fields: ChatFields | GenerateFields, error: ContextTooLong) -> float:
    """Returns the share of the request that is too much, in 0..1, with room for the answer."""
    tokens, limit = error.details["n_prompt_tokens"], error.details["n_ctx"]
    if not tokens or not limit:
        return 0.5
    wanted = (fields.options or {}).get("num_predict")
    room = wanted if isinstance(wanted, int) and 0 < wanted < limit // _ANSWER else limit // _ANSWER
    share: float = (tokens - limit + room) / tokens
    return max(0.02, min(1.0, share))


def _shorter_chat(ask: Inference, chat: ChatFields, error: ContextTooLong) -> Inference | None:
    """Drops messages from the oldest on; if only the system's and the last are left, cuts the longest."""
    messages = list(chat.messages or ())
    whole = sum(map(_length, messages)) or 1
    too_much = _excess(chat, error) * whole
    kept: list[OllamaMessage] = []
    dropped = 0
    for message in messages[:-1]:
        orphan = message.role == "tool" and dropped  # the call that it answers is gone
        if message.role != "system" and (too_much > 0 or orphan):
            too_much -= _length(message)
            dropped += 1
        else:
            kept.append(message)
    if dropped:
        before = sum(int(name.removeprefix("messages.")) for name in ask.lost if name.startswith("messages."))
        others = tuple(name for name in ask.lost if not name.startswith("messages."))
        return _with(
            msgspec.structs.replace(ask, lost=others), (f"messages.{before + dropped}",), messages=[*kept, messages[-1]]
        )
    longest = max(range(len(messages)), key=lambda place: len(messages[place].content or ""))
    text = _cut(messages[longest].content or "", _excess(chat, error), whole)
    if not text:
        return None
    messages[longest] = msgspec.structs.replace(messages[longest], content=text)
    return _with(ask, (f"{messages[longest].role}.content",), messages=messages)


def _length(message: OllamaMessage) -> int:
    calls = len(msgspec.json.encode(message.tool_calls)) if message.tool_calls else 0
    return len(message.content or "") + len(message.thinking or "") + calls + len(message.role)


def _cut(text: str, share: float, whole: int) -> str:
    """Returns the end of a text, without as much of its beginning as `share` of `whole` characters; "" if nothing is
    left."""
    return text[int(share * whole * _SPARE) + 1 :]


async def _cut_embedding(ask: Inference, embed: EmbedFields, runner: Runner, error: ContextTooLong) -> Inference | None:
    """Cuts each text at the window, as tokens."""
    limit = error.details["n_ctx"] or runner.spec.context_size
    texts = [embed.input or embed.prompt or ""] if not isinstance(embed.input, list) else embed.input
    fields = CutEmbedFields(**msgspec.structs.asdict(embed))
    if _CUTS in (runner.api.reads(_EMBEDDINGS) or ()):
        return msgspec.structs.replace(ask, fields=msgspec.structs.replace(fields, by_engine=True), lost=("input",))
    if _TOKENIZE not in runner.api.endpoints or not limit:
        return None
    ends = await _tokens("", runner, ask)
    inputs: list[Any] = []
    lost = []
    for place, text in enumerate(texts):
        assert isinstance(text, str)
        inputs.append(text)
        if len(text.encode("utf-8", "replace")) < limit - len(ends):
            continue  # a token has at least one byte
        tokens = await _tokens(text, runner, ask)
        if len(tokens) > limit:
            last = next((n for n in range(len(ends), 0, -1) if tokens[-n:] == ends[-n:]), 0)
            inputs[-1] = [*tokens[: limit - last], *tokens[len(tokens) - last :]]
            lost.append(f"input.{place}")
    return msgspec.structs.replace(ask, fields=msgspec.structs.replace(fields, inputs=inputs), lost=tuple(lost))


async def _tokens(text: str, runner: Runner, ask: Inference) -> list[int]:
    """Returns a text's tokens with those that the model wants around it. Raises `EngineProtocolError`."""
    body = msgspec.json.encode({"model": ask.fields.model, "content": text, "add_special": True})
    try:
        status, answer = await runner.upstream.fetch("POST", _TOKENIZE, body, timeout=_TOKENIZING)
        ids = msgspec.json.decode(answer, type=_TokenIds) if status == 200 else None
    except (OSError, msgspec.DecodeError) as error:
        raise EngineProtocolError(f"the engine does not tokenize: {error}") from None
    if ids is None:
        raise EngineProtocolError(f"the engine does not tokenize: status {status}")
    return ids.tokens


class _TokenIds(msgspec.Struct):
    tokens: list[int]
