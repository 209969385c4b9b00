"""A conversation with a model, and its commands, which begin with a slash."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.advice import advised
from modelrunner.cli.answer import Answer, Screen, show_end, show_timings, stream
from modelrunner.cli.client import HttpClient, path
from modelrunner.cli.commands import meant
from modelrunner.cli.devices import running_text, show_place
from modelrunner.cli.output import note, report, say
from modelrunner.cli.prepare import check_sees
from modelrunner.cli.request import Message, Parameters, schema, split_images, user_message
from modelrunner.errors import BadRequest, ModelRunnerError
from modelrunner.types import KeepAlive

HELP = (
    ("/set", "show the parameters"),
    (
        "/set NAME VALUE",
        "without VALUE: the default. NAME is system, temperature, top-p, top-k, max-tokens, seed, stop, keep-alive; "
        "format (json, or a file with a JSON schema); think (on, off); show-thinking, markdown, verbose (on, off)",
    ),
    ("/show", "show the details of the model, and what runs"),
    ("/load MODEL or FILE", "continue with another model, or with a saved conversation"),
    ("/save FILE", "save the conversation as JSON"),
    ("/retry", "ask the last question again"),
    ("/clear", "forget the conversation"),
    ("/bye", "leave; so do /exit and Ctrl-D"),
    ('"""', "begins and ends a text of several lines"),
    ("a path of an image", "in a question shows the image to the model"),
    ("Ctrl-C", "stops the answer; what is typed during it waits for its end"),
)

FENCE = '"""'
CONTEXT_FULL = "context_length_exceeded"
Number = TypeVar("Number", int, float)
_COMMAND = re.compile(r"/[a-z?-]*", re.IGNORECASE)
_LEAVE = ("/bye", "/exit", "/quit")
_SWITCHES = {"on": True, "off": False}
_PARSERS: dict[str, Callable[[str], Any]] = {
    "system": str,
    "temperature": lambda text: _at_least(0.0, float(text)),
    "top-p": lambda text: _at_least(0.0, float(text)),
    "top-k": lambda text: _at_least(0, int(text)),
    "max-tokens": lambda text: _at_least(1, int(text)),
    "seed": int,
    "stop": str,
    "keep-alive": lambda text: str(KeepAlive.parse(text)),
    "format": lambda text: text if text == "json" else schema(_place(text)),
    "think": lambda text: _SWITCHES[text],
}


@dataclass(slots=True)
class Display:
    """The display of answers: the model's thinking, Markdown rendered, times and speeds."""

    show_thinking: bool = True
    markdown: bool = True
    verbose: bool = False

    def screen(self) -> Screen:
        return Screen(hide_thinking=not self.show_thinking, markdown=self.markdown)


_DISPLAYS = [field.name.replace("_", "-") for field in fields(Display)]


class _Saved(msgspec.Struct):
    messages: list[Message]
    model: str | None = None


class Conversation:
    """`handle` takes the typed text, and returns False when the user wants to leave. `load_ahead` begins to load a
    model."""

    def __init__(
        self, client: HttpClient, parameters: Parameters, display: Display, load_ahead: Callable[[str], None]
    ) -> None:
        self.messages: list[Message] = []
        self.parameters = parameters
        self._question: Message | None = None
        self._client = client
        self._display = display
        self._load_ahead = load_ahead
        self._commands = {
            "/set": self._set,
            "/show": self._show_model,
            "/load": self._load,
            "/save": self._save,
            "/retry": self._retry,
            "/clear": self._clear,
            "/help": self._help,
            "/?": self._help,
        }

    def handle(self, text: str) -> bool:
        command, _, rest = text.strip().partition(" ")
        if command in _LEAVE:
            return False
        if command in self._commands:
            self._commands[command](rest.strip())
        elif _COMMAND.fullmatch(command):
            known = meant(command, [*self._commands, *_LEAVE])
            report(f'there is no command {command}{known or "; /? shows them"}; put """ before a question with a slash')
        elif question := text.strip().removeprefix(FENCE).removesuffix(FENCE).strip():
            self._read_question(question)
        return True

    def _read_question(self, text: str) -> None:
        question, images, missing = split_images(text)
        for name in missing:
            note(f"there is no file {name}: the model gets its name, and no image")
        try:
            message = user_message(question, images)
            if images:
                check_sees(self._client, self.parameters.model)
        except (click.UsageError, ModelRunnerError, OSError) as error:
            report(str(error))
            return
        for image in images:
            note(f"with the image {image}")
        self._ask(message, self.messages)

    def _ask(self, question: Message, before: list[Message]) -> None:
        """Asks, and keeps the received part of a stopped answer; removes a question without any answer."""
        self._question = question
        answer, messages = Answer(), [*before, question]
        try:
            stream(self._client, self.parameters.request(messages, stream=True), self._display.screen(), answer)
        except KeyboardInterrupt:
            note("(stopped)")
        except ModelRunnerError as error:
            full = "; /clear begins a new conversation" if error.code == CONTEXT_FULL and before else ""
            report(error.message + full if full else advised(error, "run"), retry_after=error.retry_after)
            return
        show_end(answer)
        if answer.text:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        if self._display.verbose:
            show_timings(answer)
            show_place(self._client, self.parameters.model)

    def _retry(self, rest: str) -> None:
        if self._question is None:
            report("there is no question yet: type one")
            return
        answered = self.messages[-2:-1] == [self._question]
        self._ask(self._question, self.messages[:-2] if answered else self.messages)

    def _set(self, rest: str) -> None:
        name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
        name, value = name.replace("_", "-"), value.strip().strip('"')
        if not name:
            self._show()
        elif name in _DISPLAYS and value in _SWITCHES:
            setattr(self._display, name.replace("-", "_"), _SWITCHES[value])
            self._show(name)
        elif name in _PARSERS:
            try:
                changed: dict[str, Any] = {name.replace("-", "_"): _PARSERS[name](value) if value else None}
                self.parameters = replace(self.parameters, **changed)
                self._show(name)
            except click.UsageError as error:
                report(error.message)
            except (ValueError, KeyError, BadRequest):
                report(f"{value!r} is not a valid value for {name}")
        elif name in _DISPLAYS:
            report(f"{name} must be on or off: /set {name} on")
        else:
            report(f"there is no parameter {name!r}{meant(name, [*_PARSERS, *_DISPLAYS])}; /? shows them")

    def _show(self, *names: str) -> None:
        """Shows parameters with their values, by default all."""
        for name in names or (*_PARSERS, *_DISPLAYS):
            value = getattr(self._display if name in _DISPLAYS else self.parameters, name.replace("-", "_"))
            say(f"{name:<14}{'(default)' if value is None else _said(value)}")

    def _show_model(self, rest: str) -> None:
        try:
            model = self._client.call("GET", path("models", self.parameters.model), wire.Model)
            runners = self._client.call("GET", "/engines/ps", list[wire.RunnerStatus])
        except ModelRunnerError as error:
            report(error.message)
            return
        simple = [(key, str(value)) for key, value in model.config.items() if not isinstance(value, dict | list)]
        runs = [("runs", running_text(each)) for each in runners if model.id in each.models]
        about = [("model", self.parameters.model), ("id", model.id), *sorted(simple)]
        output.fields([*about, *(runs or [("runs", "no; the next question loads it")])])

    def _load(self, rest: str) -> None:
        if not rest:
            report("/load MODEL or FILE: `modelrunner ls` lists the models, /save writes a file")
        elif (file := _place(rest)).is_file():
            self._load_file(file)
        elif rest.endswith(".json") or rest.startswith(("/", "./", "../", "~")):
            report(f"there is no file {file}: /save writes one, and `modelrunner ls` lists the models")
        elif self._load_model(rest):
            say(f"the next question goes to {rest}")

    def _load_model(self, model: str) -> bool:
        try:
            self._client.fetch("GET", path("models", model))
        except ModelRunnerError as error:
            report(error.message)
            return False
        self.parameters = replace(self.parameters, model=model)
        self._load_ahead(model)
        return True

    def _load_file(self, file: Path) -> None:
        try:
            saved = msgspec.json.decode(file.read_bytes(), type=_Saved)
        except (OSError, msgspec.MsgspecError) as error:
            report(f"{file} is not a conversation that /save wrote: {error}")
            return
        if saved.model and saved.model != self.parameters.model and not self._load_model(saved.model):
            return
        system = [str(message.get("content")) for message in saved.messages if message.get("role") == "system"]
        self.messages = [message for message in saved.messages if message.get("role") != "system"]
        self.parameters = replace(self.parameters, system=system[0] if system else None)
        self._question = next((message for message in reversed(self.messages) if message.get("role") == "user"), None)
        say(f"{len(self.messages)} messages of {file}; the next question goes to {self.parameters.model}")

    def _save(self, rest: str) -> None:
        if not rest:
            report("/save FILE: name the file to write")
            return
        file_path = _place(rest)
        system = [{"role": "system", "content": self.parameters.system}] if self.parameters.system else []
        content = {"model": self.parameters.model, "messages": [*system, *self.messages]}
        try:
            with file_path.open("x", encoding="utf-8") as file:
                json.dump(content, file, ensure_ascii=False, indent=2)
        except FileExistsError:
            report(f"{file_path} exists already: give another name")
        except OSError as error:
            report(f"{rest} cannot be written ({error.strerror}): give the name of a file")
        else:
            say(f"saved as {file_path}")

    def _clear(self, rest: str) -> None:
        self.messages, self._question = [], None
        say("the conversation is forgotten")

    def _help(self, rest: str) -> None:
        output.fields(HELP)


def _place(text: str) -> Path:
    """Returns the path that a user typed; the tilde of a user who does not exist stays."""
    return Path(os.path.expanduser(text))


def _said(value: object) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case dict():
            return "a JSON schema"
        case _:
            return str(value)


def _at_least(least: Number, value: Number) -> Number:
    if not value >= least:
        raise ValueError
    return value
