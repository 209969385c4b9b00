"""The interactive chat: a conversation that grows, and commands that begin with a slash."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from modelrunner.cli.answer import Answer, Screen, show_timings, stream
from modelrunner.cli.output import note, report, say
from modelrunner.cli.request import Message, Parameters, user_message
from modelrunner.client import Client
from modelrunner.errors import ModelRunnerError
from modelrunner.locations import ConfigurationError, Locations

HELP = '''\
/set                    show the parameters
/set NAME VALUE         system, temperature, max-tokens, seed, keep-alive, format (json),
                        thinking (on, off), verbose (on, off); without VALUE: the default
/save FILE              write the conversation as JSON
/clear                  forget the conversation
/bye                    leave; so does Ctrl-D
"""                     begins and ends a text of several lines
Ctrl-C                  stops the answer'''

_FENCE = '"""'
_PARSERS: dict[str, Callable[[str], Any]] = {
    "system": str,
    "temperature": float,
    "max-tokens": int,
    "seed": int,
    "keep-alive": str,
    "format": lambda text: {"json": "json"}[text],
}
_SWITCHES = {"on": True, "off": False}


class Chat:
    """One conversation. `handle` takes what was typed, and returns False once the person wants to leave."""

    def __init__(self, client: Client, parameters: Parameters, *, hide_thinking: bool, verbose: bool) -> None:
        self.messages: list[Message] = []
        self.parameters = parameters
        self._client = client
        self._switches = {"thinking": not hide_thinking, "verbose": verbose}
        self._commands = {"/set": self._set, "/save": self._save, "/clear": self._clear, "/?": self._help}

    def handle(self, text: str) -> bool:
        command, _, rest = text.strip().partition(" ")
        if command == "/bye":
            return False
        if command.startswith("/") and not text.startswith(_FENCE):
            self._commands.get(command, self._unknown)(rest.strip())
        elif question := text.strip().removeprefix(_FENCE).removesuffix(_FENCE).strip():
            self._ask(question)
        return True

    def _ask(self, question: str) -> None:
        """An answer that was stopped counts as far as it came; a question without one is forgotten."""
        answer = Answer()
        asked = [*self.messages, user_message(question)]
        body = self.parameters.request(asked, stream=True)
        try:
            stream(self._client, body, Screen(hide_thinking=not self._switches["thinking"]), answer)
        except KeyboardInterrupt:
            note("(stopped)")
        except ModelRunnerError as error:
            report(error.message, retry_after=error.retry_after)
            return
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
            except (ValueError, KeyError):
                report(f"{value!r} is no value for {name}")
        else:
            report(f"there is no such thing to set: {rest}; /? shows what there is")

    def _show(self) -> None:
        for name in _PARSERS:
            value = getattr(self.parameters, name.replace("-", "_"))
            say(f"{name:<12} {'(default)' if value is None else value}")
        for name, on in self._switches.items():
            say(f"{name:<12} {'on' if on else 'off'}")

    def _save(self, rest: str) -> None:
        path = Path(rest).expanduser()
        system = [{"role": "system", "content": self.parameters.system}] if self.parameters.system else []
        content = {"model": self.parameters.model, "messages": [*system, *self.messages]}
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(content, file, ensure_ascii=False, indent=2)
        except FileExistsError:
            report(f"{path} is there already: give another name")
        except OSError as error:
            report(f"{rest or 'nothing'} cannot be written ({error.strerror}): give the name of a file")
        else:
            say(f"saved as {path}")

    def _clear(self, rest: str) -> None:
        self.messages = []
        say("the conversation is forgotten")

    def _help(self, rest: str) -> None:
        say(HELP)

    def _unknown(self, rest: str) -> None:
        report('there is no such command: /? shows them; put """ before a question that begins with a slash')


def chat(client: Client, parameters: Parameters, *, hide_thinking: bool, verbose: bool) -> None:
    """Asks and answers at the terminal until the person leaves."""
    session: PromptSession[str] = PromptSession(history=_history())
    conversation = Chat(client, parameters, hide_thinking=hide_thinking, verbose=verbose)
    note(f"chatting with {parameters.model}: /? for help, /bye to leave")
    while True:
        try:
            if not conversation.handle(_read(session)):
                return
        except EOFError:
            return
        except KeyboardInterrupt:
            note("/bye or Ctrl-D leaves")


def _read(session: "PromptSession[str]") -> str:
    """A line, or what stands between two fences."""
    text = session.prompt(">>> ")
    while text.lstrip().startswith(_FENCE) and (len(text.strip()) < 6 or not text.rstrip().endswith(_FENCE)):
        text += "\n" + session.prompt("... ")
    return text


def _history() -> History:
    """Kept for the person alone; only in memory where it cannot be kept."""
    try:
        data = Locations.find().data
        path = data / "state" / "chat-history"
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except (OSError, ConfigurationError):
        return InMemoryHistory()
    return FileHistory(path)
