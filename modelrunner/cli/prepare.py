"""Prepares a model for requests: pulls it, installs its engine, and sets its configuration."""

from contextlib import suppress
from typing import Any

from modelrunner import wire
from modelrunner.cli.client import HttpClient, path
from modelrunner.cli.output import done, note
from modelrunner.cli.progressdisplay import Displays, follow
from modelrunner.cli.request import STARTER, STARTER_SYSTEM, SYSTEM
from modelrunner.errors import BadRequest, Forbidden, ModelNotFound, ModelRunnerError


def prepare(client: HttpClient, model: str, *, backend: str | None, context_size: int | None) -> str:
    """Pulls and installs what is missing, with a note, and returns the model's name. `backend` and `context_size`
    become part of the model's configuration, because a request never reloads a model."""
    try:
        client.fetch("GET", path("models", model))
    except ModelNotFound as missing:
        note(f"{model} is not here yet: pulling it")
        try:
            model = pull(client, wire.PullRequest(model))
        except ModelRunnerError as error:
            _, near, names = missing.message.partition("did you mean")
            raise error.saying(f"{error.message}; {near}{names}" if near else error.message) from None
    if backend is not None or context_size is not None:
        changes = {"backend": backend, "context-size": context_size}
        wanted = {name: value for name, value in changes.items() if value is not None}
        client.fetch("POST", "/engines/_configure", {"model": model, "apply": "restart", **wanted}, timeout=None)
        settings = " and ".join(f"{name} {value}" for name, value in wanted.items())
        note(f"{model} now runs with {settings} for everybody; `modelrunner configure {model}` shows and changes that")
    _install_engine(client, model)
    return model


def first_able(client: HttpClient, capability: str, does: str, source: str) -> str:
    """Returns the first model here with the capability. Raises `ModelNotFound`, which says what none `does`, and names
    the `source` of one that does."""
    here = [m.name for m in client.call("GET", "/models", list[wire.Model]) if capability in m.capabilities]
    if not here:
        raise ModelNotFound(f"no model here {does}: `modelrunner pull {source}` gets one that does")
    return here[0]


def default_system(client: HttpClient, model: str) -> str | None:
    """Returns the system prompt for a person who gives none. None leaves it to the daemon, which adds what the model
    carries."""
    shown = client.call("GET", path("models", model), dict[str, Any])
    carried = shown.get("config", {}).get("defaults", {})
    if "system" in carried or "messages" in carried:
        return None
    is_starter = any(tag.partition("==")[0] == STARTER for tag in shown.get("tags", []))
    return STARTER_SYSTEM if is_starter else SYSTEM


def check_sees(client: HttpClient, model: str) -> None:
    """Raises `BadRequest` for a model that is known to take no images."""
    able = client.call("GET", path("models", model), dict[str, object]).get("capabilities")
    if able and isinstance(able, list) and "vision" not in able:
        raise BadRequest(f"{model} takes no images: `modelrunner list` shows the models with vision")


def pull(client: HttpClient, wanted: wire.PullRequest, *, displays: Displays | None = None) -> str:
    """Downloads, packages or makes a model with progress, on the `displays` that several pulls share; returns the
    model's name."""
    source, name = wanted.from_, wanted.name
    try:
        last = follow(client.progress("/models/create", wanted), f"the pull of {source}", displays=displays)
    except KeyboardInterrupt:
        note("stopped; the same command goes on where it was")
        raise
    return last.model or name or source


def pulled(client: HttpClient, name: str, as_json: bool) -> None:
    """Prints the name of a model that is here now, and says if the engine that runs it is missing."""
    done(name, as_json, model=name)
    with suppress(ModelRunnerError):  # the pull has succeeded
        if backend := missing_engine(client, name):
            note(f"{backend}, which runs it, is not installed yet: `modelrunner install {backend}` does that")


def install(
    client: HttpClient, backend: str, *, build: bool = False, variant: str = "", action: str = "install"
) -> str:
    """Installs, updates or uninstalls an engine with progress; returns the daemon's closing sentence."""
    body = wire.InstallRequest(backend, build, variant)
    lines = client.progress(f"/engines/{action}-backend", body)
    return follow(lines, f"the {action} of {backend}", f"{action} {backend}").message


def is_missing(status: str) -> bool:
    """Returns whether a text of GET /engines/status says that the engine is not installed."""
    return status.partition(":")[0] in ("", "Not Installed")


def missing_engine(client: HttpClient, model: str) -> str | None:
    """Returns the backend of the model if its engine is not installed. Returns None, too, if no backend here runs the
    model: the request's error says why."""
    backend = client.call("GET", path("v1", "models", model), dict[str, object]).get("backend")
    if not isinstance(backend, str):
        return None
    status = client.call("GET", "/engines/status", dict[str, str]).get(backend)
    return backend if status is not None and is_missing(status) else None


def _install_engine(client: HttpClient, model: str) -> None:
    with suppress(Forbidden):  # without the scope admin: the daemon installs it for the request
        if backend := missing_engine(client, model):
            note(f"{backend} is not installed yet: installing it")
            install(client, backend)
