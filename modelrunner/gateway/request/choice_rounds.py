"""Answers with more choices (`n`) than an engine makes at once (`EndpointApi.choices_by_sequence`). It is asked in
rounds, one after another under one lease, and their streams become one. The first leaves the prompt in its cache."""

from typing import Any

import msgspec

from modelrunner.errors import BadRequest
from modelrunner.gateway.calls import Translation
from modelrunner.gateway.dialects.rewritten import RewrittenEvents
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.gateway.request.tokens import Tokens

MOST_CHOICES = 128
"""OpenAI's own limit: https://platform.openai.com/docs/api-reference/chat/create"""
_event = msgspec.json.Decoder(dict[str, msgspec.Raw])
_choices = msgspec.json.Decoder(list[dict[str, Any]])


class ChoiceRounds(RewrittenEvents):
    """A `Translation` of the streams of all rounds to the stream of one request for `copies` choices, which `then`
    translates further. `most` is the number of choices of a round. The client's `seed` is that of its first choice, and
    grows by one for each."""

    def __init__(self, request: EngineRequest, copies: int, most: int, then: Translation) -> None:
        """Makes `request` that of the first round. Raises `BadRequest` for more than `MOST_CHOICES`."""
        if copies > MOST_CHOICES:
            raise BadRequest(f"a request may ask for at most {MOST_CHOICES} choices", param="n")
        super().__init__()
        self.request = request
        self._copies, self._most, self._then = copies, most, then
        self.headers, self.whole, self.chunk_per_line = then.headers, then.whole, then.chunk_per_line
        self.done = 0  # choices of the rounds before
        self.paused = False
        """True while the client reads no more."""
        self._seed = request.get("seed")
        self._failed = False
        self._identity: dict[str, msgspec.Raw] = {}  # of the first round, for the events of all
        self._ask()

    def go_on(self) -> bool:
        """Makes `request` that of the next round, once a round has ended; returns False after the last one."""
        if self._failed or self.done + self._in_round >= self._copies:
            return False
        self.done += self._in_round
        self._ask()
        return True

    def _ask(self) -> None:
        self._in_round = min(self._most, self._copies - self.done)
        self.request.set({"n": self._in_round, "n_cmpl": None})
        if self.done and type(self._seed) is int and self._seed >= 0:  # a negative one is random
            self.request.set({"seed": self._seed + self.done})

    @property
    def counted(self) -> Tokens | None:
        return self._then.counted

    def piece(self, data: bytes) -> bytes:
        return self._then.piece(super().piece(data))

    def end(self) -> bytes:
        return self._then.piece(super().end()) + self._then.end()

    def event(self, event: bytes) -> bytes:
        if not event.startswith(b"data:"):
            return event
        data = event[5:].strip()
        if data == b"[DONE]":
            return event if self._failed or self.done + self._in_round >= self._copies else b""
        if data == b"null":
            return event
        fields: dict[str, Any] = _event.decode(data)
        self._failed = self._failed or ("error" in fields and bytes(fields["error"]) != b"null")
        if not self._identity:
            self._identity = {name: fields[name] for name in ("id", "created") if name in fields}
        if "choices" in fields:
            choices = _choices.decode(fields["choices"])
            fields["choices"] = [choice | {"index": self._place(choice.get("index", 0))} for choice in choices]
        return b"data: " + msgspec.json.encode(fields | self._identity)

    def _place(self, index: int) -> int:
        """Returns the place of a round's choice: those of a prompt follow each other."""
        prompt, copy = divmod(index, self._in_round)
        return prompt * self._copies + self.done + copy
