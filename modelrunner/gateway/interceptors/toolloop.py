"""Tool loops: chats whose tool calls the daemon makes itself, until the model answers."""

import asyncio
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from modelrunner.errors import BadRequest, ModelRunnerError, PayloadTooLarge, TimedOut, ToolServerFailed
from modelrunner.gateway.calls import Inference, Sink
from modelrunner.gateway.dialects.assembly import Event
from modelrunner.gateway.dialects.dialect import EVENT_STREAM, JSON
from modelrunner.gateway.interceptors.forwarded import Relay
from modelrunner.gateway.interceptors.toolchat import ToolChat
from modelrunner.gateway.interceptors.toolturn import ToolCall, ToolTurn, TurnDialect, sse
from modelrunner.gateway.request.exchange import Exchange
from modelrunner.gateway.request.tokens import Tokens
from modelrunner.gateway.request.waiting import guarded
from modelrunner.http.answers import Header
from modelrunner.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from modelrunner.gateway.request.pipeline import Pipeline

_ALIVE = b": a tool is at work\n\n"


class ToolLoops:
    """An `Interceptor` for chats with `modelrunner_tools`. A loop has at most `rounds` rounds of calls, which may be
    several calls at once, and takes at most `seconds`."""

    def __init__(self, pipeline: "Pipeline", toolbox: Toolbox, rounds: int, seconds: float) -> None:
        self.pipeline, self.toolbox = pipeline, toolbox
        self.rounds, self.seconds = rounds, seconds

    def take(self, ask: Inference, sink: Sink) -> Relay | None:
        if ask.only_loads:
            return None
        loop = _ToolLoop(self, ask)
        loop.relay = Relay(self.pipeline, ask, sink, loop)
        return loop.relay


class _Question(Exchange):
    """One request of a loop to the engine. The loop's relay counts and records it, and answers its errors."""

    def __init__(self, pipeline: "Pipeline", ask: Inference, loop: "_ToolLoop", dialect: TurnDialect) -> None:
        super().__init__(pipeline, ask, loop)
        self.is_told = self.is_counted = False
        self._dialect = self._turns = dialect
        self._loop = loop
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def turn(self) -> ToolTurn:
        return self._turns.turn

    def _refuse(self, error: ModelRunnerError) -> None:
        if not self._over:
            self._close()
            self.end(error)

    def _say(self, data: bytes) -> None:
        self._loop.say(data)

    def end(self, error: ModelRunnerError | None = None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


class _ToolLoop:
    """One chat: the `AnswerSource` of its relay, and the `Sink` of each question to the engine."""

    takes_chunks = False
    relay: Relay

    def __init__(self, loops: ToolLoops, ask: Inference) -> None:
        self._loops = loops
        self._ask = ask
        self._streams = bool(ask.fields.stream)
        self._task: asyncio.Task[None] | None = None
        self._question: _Question | None = None
        self._first: Event = {}
        self._headers: tuple[Header, ...] = ()
        self._own = b""
        self._begun = False  # the client has the head of its stream
        self._usage = [0, 0, 0]  # tokens of prompts, of answers, and of prompts that were cached
        self._made: list[dict[str, Any]] = []  # the calls so far, as the client sees them

    # AnswerSource

    def begin(self, relay: Relay) -> None:
        id = self._ask.request_id
        self._task = guarded(self._run(), id, relay.refuse, name=f"tools of {id}")

    def pause(self, relay: Relay) -> None:
        if self._question is not None:
            self._question.pause()

    def resume(self, relay: Relay) -> None:
        if self._question is not None:
            self._question.resume()

    def leave(self, relay: Relay) -> None:
        if (question := self._question) is not None:
            self._note_lease(question)
            if not question.over.done():
                self._count(question, question.record().tokens)
                question.cancel()
        if self._task is not None:
            self._task.cancel()

    # Sink

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        if not self._own:
            self._headers += tuple(one for one in headers if one[0].startswith(b"X-Modelrunner"))
            self._own = own
        if self._streams:
            self._say_head()

    def write(self, data: bytes) -> None:
        self.relay.write(data)

    def finish(self) -> None:
        assert self._question is not None
        used = self._question.turn.usage
        self._count(self._question, Tokens(used.prompt_tokens, used.completion_tokens, used.cached))
        self._question.end()

    def cut(self) -> None:
        """Never called: `_Question.end` gets the errors."""

    def say(self, data: bytes) -> None:
        """Sends an event of our own to a client that streams."""
        if self._streams:
            self._say_head()
            self.relay.write(data)

    def _say_head(self) -> None:
        if not self._begun:
            self._begun = True
            self.relay.respond(200, (*EVENT_STREAM, *self._headers), None, b"", self._own)

    # the loop

    async def _run(self) -> None:
        seconds = self._loops.seconds
        try:
            async with asyncio.timeout(seconds):
                await self._answer()
        except TimeoutError:
            raise TimedOut(f"no answer after {seconds:g} s of tool calls: `tools_loop_time` allows no more") from None

    async def _answer(self) -> None:
        chat = ToolChat(self._ask.body)
        found, faults = await self._loops.toolbox.tools()
        if faults and not found:
            raise ToolServerFailed("; ".join(faults.values()))
        if faults:
            self._headers += ((b"X-Modelrunner-Tools-Missing", ", ".join(faults).encode()),)
        ours = [tool.function() for tool in found if tool.name not in chat.theirs]
        for _ in range(self._loops.rounds):
            turn = await self._asked(chat, ours)
            calls = turn.calls()
            if not calls:
                break
            told = await self._call_all(calls)
            chat.add(turn.message().get("content"), calls, [one["result"] for one in told])
        else:
            turn = await self._asked(chat, ())  # without our tools, so that the model has to answer
        self._finish(chat, turn)

    async def _asked(self, chat: ToolChat, ours: Sequence[dict[str, Any]]) -> ToolTurn:
        """Asks the model, and returns its complete answer."""
        pipeline, body = self._loops.pipeline, chat.request(ours)
        dialect = TurnDialect(
            lambda: ToolTurn(chat.theirs, streams=self._streams, first=self._first), streams=self._streams
        )
        fields = msgspec.structs.replace(dialect.read(body), keep_alive=self._ask.fields.keep_alive)
        fields = msgspec.structs.replace(fields, model=self._ask.fields.model)
        try:
            pipeline.buffer(len(body), len(body))
        except PayloadTooLarge as error:
            raise error.saying(f"the conversation with the results of tools is too large: {error.message}") from None
        ask = msgspec.structs.replace(self._ask, body=body, fields=fields)
        self._question = question = _Question(pipeline, ask, self, dialect)
        try:
            question.start()
            await question.over
        except BaseException:
            self._count(question, question.record().tokens)
            raise
        finally:
            self._note_lease(question)
            question.cancel()
        # The model that was chosen for an alias answers the whole chat.
        self._ask = msgspec.structs.replace(question.ask, body=self._ask.body)
        self._first = question.turn.first
        return question.turn

    def _note_lease(self, question: _Question) -> None:
        """Keeps the lease for the record, also if no answer came."""
        self.relay.lease = question.lease or self.relay.lease

    def _count(self, question: _Question, used: Tokens) -> None:
        """Adds the tokens of a question that is over. Does nothing for one that was counted."""
        if question.is_counted:
            return
        question.is_counted = True
        self._usage = [a + b for a, b in zip(self._usage, (used.prompt, used.answer, used.cached), strict=True)]
        self.relay.tokens = Tokens(*self._usage)

    async def _call_all(self, calls: list[ToolCall]) -> list[dict[str, Any]]:
        """Makes the calls, and returns them with their results, in the same order."""
        tasks = [asyncio.create_task(self._call(call), name=f"call of {call.name}") for call in calls]
        every = self._loops.pipeline.limits.comment_every
        try:
            while (await asyncio.wait(tasks, timeout=every))[1]:
                self.say(_ALIVE)
            told = [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
        self._made += told
        return told

    async def _call(self, call: ToolCall) -> dict[str, Any]:
        """Makes one call. An error becomes its result."""
        told: dict[str, Any] = call._asdict()
        self._tell("tool_call", told)
        began = perf_counter()
        arguments = call.decoded()
        try:
            if arguments is None:
                raise BadRequest("the arguments are not a JSON object")
            found = await self._loops.toolbox.call(call.name, arguments)
            text = found.text or (msgspec.json.encode(found.structured).decode() if found.structured else "")
            result, is_error = text, found.is_error
        except ModelRunnerError as error:
            result, is_error = f"Error: {error.message}", True
        told |= {"result": result, "is_error": is_error, "seconds": round(perf_counter() - began, 3)}
        self._tell("tool_result", told)
        return told

    def _tell(self, kind: str, told: dict[str, Any]) -> None:
        """Sends an event that is also a chunk without choices, for clients that know only chunks."""
        chunk: dict[str, Any] = {"object": "chat.completion.chunk", **self._first, "choices": []}
        self.say(sse(msgspec.json.encode({**chunk, f"modelrunner_{kind}": told}), f"modelrunner.{kind}"))

    def _finish(self, chat: ToolChat, turn: ToolTurn) -> None:
        given_up = bool(turn.calls())
        prompt, answer, cached = self._usage
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if not self._streams:
            whole = {**turn.final(given_up=given_up), "usage": usage, "modelrunner_tool_calls": self._made}
            body = msgspec.json.encode(whole)
            self.relay.respond(200, (JSON, *self._headers), len(body), body, self._own)
            self.relay.finish()
            return
        events: list[dict[str, Any]] = [*turn.last_events(given_up=given_up)]
        if chat.wants_usage:
            events.append({"object": "chat.completion.chunk", **self._first, "choices": [], "usage": usage})
        self.relay.write(b"".join(sse(msgspec.json.encode(event)) for event in events) + b"data: [DONE]\n\n")
        self.relay.finish()
