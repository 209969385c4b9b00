"""The interactive chat: a conversation that grows, and commands that begin with a slash."""

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from modelrunner import wire
from modelrunner.cli.answer import Answer, Screen, show_end, show_timings, stream
from modelrunner.cli.client import Client, path
from modelrunner.cli.commands import meant
from modelrunner.cli.output import fields, note, report, say
from modelrunner.cli.request import Message, Parameters, user_message
from modelrunner.config.locations import ConfigurationError, Locations
from modelrunner.errors import BadRequest, ModelRunnerError
from modelrunner.types import KeepAlive

HELP = '''\
/set                    show the parameters
/set NAME VALUE         system, temperature, max-tokens, seed, keep-alive, format (json),
                        thinking (on, off), verbose (on, off); without VALUE: the default
/show                   show what is known about the model
/load MODEL             go on with another model
/save FILE              write the conversation as JSON
/clear                  forget the conversation
/bye                    leave; so do /exit and Ctrl-D
"""                     begins and ends a text of several lines
Ctrl-C                  stops the answer'''

Number = TypeVar("Number", int, float)
CONTEXT_FULL = "context_length_exceeded"
_FENCE = '"""'
_PARSERS: dict[str, Callable[[str], Any]] = {
    "system": str,
    "temperature": lambda text: _at_least(0.0, float(text)),
    "max-tokens": lambda text: _at_least(1, int(text)),
    "seed": int,
    "keep-alive": lambda text: str(KeepAlive.parse(text)),
    "format": lambda text: {"json": "json"}[text],
}
_LEAVE = ("/bye", "/exit", "/quit")
_SWITCHES = {"on": True, "off": False}


class Chat:
    """One conversation. `handle` takes the typed text, and returns False when the user wants to leave."""

    def __init__(self, client: Client, parameters: Parameters, *, hide_thinking: bool, verbose: bool) -> None:
        self.messages: list[Message] = []
        self.parameters = parameters
        self._client = client
        self._switches = {"thinking": not hide_thinking, "verbose": verbose}
        self._commands = {
            "/set": self._set,
            "/show": self._show_model,
            "/load": self._load,
            "/save": self._save,
            "/clear": self._clear,
            "/help": self._help,
            "/?": self._help,
        }

    def handle(self, text: str) -> bool:
        command, _, rest = text.strip().partition(" ")
        if command in _LEAVE:
            return False
        if command.startswith("/") and not text.startswith(_FENCE):
            if command in self._commands:
                self._commands[command](rest.strip())
            else:
                known = meant(command, [*self._commands, *_LEAVE])
                report(
                    f'there is no command {command}{known or "; /? shows them"}; put """ before a question with a slash'
                )
        elif question := text.strip().removeprefix(_FENCE).removesuffix(_FENCE).strip():
            self._ask(question)
        return True

    def _ask(self, question: str) -> None:
        """Asks, and keeps the received part of a stopped answer; forgets a question without any answer."""
        answer = Answer()
        asked = [*self.messages, user_message(question)]
        body = self.parameters.request(asked, stream=True)
        try:
            stream(self._client, body, Screen(hide_thinking=not self._switches["thinking"]), answer)
        except KeyboardInterrupt:
            note("(stopped)")
        except ModelRunnerError as error:
            full = "; /clear begins a new conversation" if error.code == CONTEXT_FULL and self.messages else ""
            report(error.message + full, retry_after=error.retry_after)
            return
        show_end(answer)
        if answer.text:
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if self._switches["verbose"]:
            show_timings(answer)

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        name, value = name.replace("_", "-"), value.strip().strip('"')
        if not name:
            self._show()
        elif name in self._switches and value in _SWITCHES:
            self._switches[name] = _SWITCHES[value]
        elif name in _PARSERS:
            try:
                changed: dict[str, Any] = {name.replace("-", "_"): _PARSERS[name](value) if value else None}
                self.parameters = replace(self.parameters, **changed)
            except (ValueError, KeyError, BadRequest):
                report(f"{value!r} is no value for {name}")
        else:
            report(f"there is no parameter {name!r}{meant(name, [*_PARSERS, *self._switches])}; /? shows them")

    def _show(self) -> None:
        for name in _PARSERS:
            value = getattr(self.parameters, name.replace("-", "_"))
            say(f"{name:<12} {'(default)' if value is None else value}")
        for name, on in self._switches.items():
            say(f"{name:<12} {'on' if on else 'off'}")

    def _show_model(self, rest: str) -> None:
        try:
            found = self._client.call("GET", path("models", self.parameters.model), wire.Model)
        except ModelRunnerError as error:
            report(error.message)
            return
        simple = [(key, str(value)) for key, value in found.config.items() if not isinstance(value, dict | list)]
        fields([("model", self.parameters.model), ("id", found.id), *sorted(simple)])

    def _load(self, rest: str) -> None:
        if not rest:
            report("/load MODEL: name the model to go on with; `modelrunner ls` lists those that are here")
            return
        try:
            self._client.fetch("GET", path("models", rest))
        except ModelRunnerError as error:
            report(error.message)
            return
        self.parameters = replace(self.parameters, model=rest)
        load_ahead(self._client, rest)
        say(f"the next question goes to {rest}")

    def _save(self, rest: str) -> None:
        if not rest:
            report("/save FILE: name the file to write")
            return
        file_path = Path(rest).expanduser()
        system = [{"role": "system", "content": self.parameters.system}] if self.parameters.system else []
        content = {"model": self.parameters.model, "messages": [*system, *self.messages]}
        try:
            with file_path.open("x", encoding="utf-8") as file:
                json.dump(content, file, ensure_ascii=False, indent=2)
        except FileExistsError:
            report(f"{file_path} is there already: give another name")
        except OSError as error:
            report(f"{rest or 'nothing'} cannot be written ({error.strerror}): give the name of a file")
        else:
            say(f"saved as {file_path}")

    def _clear(self, rest: str) -> None:
        self.messages = []
        say("the conversation is forgotten")

    def _help(self, rest: str) -> None:
        say(HELP)


def chat(client: Client, parameters: Parameters, *, hide_thinking: bool, verbose: bool) -> None:
    """Runs the chat at the terminal until the user leaves."""
    session: PromptSession[str] = PromptSession(history=_history())
    conversation = Chat(client, parameters, hide_thinking=hide_thinking, verbose=verbose)
    load_ahead(client, parameters.model)
    note(f"chatting with {parameters.model}: /? for help, /bye to leave")
    while True:
        try:
            if not conversation.handle(_read(session)):
                return
        except EOFError:
            return
        except KeyboardInterrupt:
            note("/bye or Ctrl-D leaves")


def load_ahead(client: Client, model: str) -> None:
    """Begins to load the model while the user types. The first question reports a failed load."""

    def load() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C has to interrupt the main thread's read
        with suppress(ModelRunnerError):
            client.fetch("POST", "/engines/preload", wire.ModelName(model), timeout=None)

    threading.Thread(target=load, daemon=True).start()


def _at_least(least: Number, value: Number) -> Number:
    if not value >= least:
        raise ValueError
    return value


def _read(session: "PromptSession[str]") -> str:
    """Reads a line, or several lines between two fences."""
    text = session.prompt(">>> ")
    while text.lstrip().startswith(_FENCE) and (len(text.strip()) < 6 or not text.rstrip().endswith(_FENCE)):
        text += "\n" + session.prompt("... ")
    return text


def _history() -> History:
    """Keeps the typed lines in a file that only the user can read, or in memory if no file can be made."""
    try:
        data = Locations.find().data
        history = data / "state" / "chat-history"
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        history.parent.mkdir(exist_ok=True)
        os.close(os.open(history, os.O_WRONLY | os.O_CREAT, 0o600))
    except (OSError, ConfigurationError):
        return InMemoryHistory()
    return FileHistory(history)
