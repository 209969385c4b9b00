"""The interactive chat at the terminal."""

import os
import signal
import threading
from contextlib import suppress

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from modelrunner import durable, wire
from modelrunner.cli.client import HttpClient
from modelrunner.cli.conversation import FENCE, Conversation, Display
from modelrunner.cli.output import note
from modelrunner.cli.request import Parameters
from modelrunner.config.locations import ConfigurationError, Locations
from modelrunner.errors import ModelRunnerError


def chat(client: HttpClient, parameters: Parameters, display: Display) -> None:
    """Runs the chat at the terminal until the user leaves."""
    session: PromptSession[str] = PromptSession(history=_history())
    conversation = Conversation(client, parameters, display, lambda model: load_ahead(client, model))
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


def load_ahead(client: HttpClient, model: str) -> None:
    """Begins to load the model while the user types. The first question reports a failed load."""

    def load() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C has to interrupt the main thread's read
        with suppress(ModelRunnerError):
            client.fetch("POST", "/engines/preload", wire.ModelName(model), timeout=None)

    threading.Thread(target=load, daemon=True).start()


def _read(session: "PromptSession[str]") -> str:
    """Reads a line, or several lines between two fences. A pasted text keeps its lines (bracketed paste)."""
    text = session.prompt(">>> ")
    while text.lstrip().startswith(FENCE) and (len(text.strip()) < 6 or not text.rstrip().endswith(FENCE)):
        text += "\n" + session.prompt("... ")
    return text


def _history() -> History:
    """Keeps the typed lines in a file that only the user can read, or in memory if no file can be made."""
    try:
        data = Locations.find().data
        history = data / "state" / "chat-history"
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        history.parent.mkdir(exist_ok=True)
        os.close(durable.open_ours(str(history), os.O_WRONLY | os.O_CREAT))
    except (OSError, ConfigurationError):
        return InMemoryHistory()
    return FileHistory(history)
