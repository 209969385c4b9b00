"""The command launch, which starts a program with this daemon as its API, and a model that can do what it asks for."""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import join, quote
from typing import Any

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.agents import AGENTS, Agent, AgentLaunch, AgentTarget
from modelrunner.cli.client import HttpClient, path
from modelrunner.cli.common_options import with_client
from modelrunner.errors import ModelRunnerError

_SHOWN = 5  # models that a message names
_PRESETS = "launch/"  # before the names of the presets that are made here; no part of another name means one of them
_ABLE = "hf.co/Qwen/Qwen3-4B-GGUF"  # has tools, and a window of 40,960 tokens


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("agent", type=click.Choice(list(AGENTS)), metavar="AGENT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]...")
@click.option("--model", metavar="MODEL", help="The model; by default the one that suits the program.")
@click.option("--yes", is_flag=True, help="Take the offered model and window without a question.")
@click.option("--dry-run", is_flag=True, help="Only show the file and the command.")
@with_client()
def launch(
    client: HttpClient, agent: str, arguments: tuple[str, ...], model: str | None, yes: bool, dry_run: bool
) -> None:
    """Start a coding agent, or another program, with a model of this machine.

    AGENT is claude, codex, opencode, aider, goose, continue, zed, open-webui, or env, which prints the variables for a
    shell: eval "$(modelrunner launch env)". Further ARGUMENTS go to the program. Before the command changes a file of
    the program, it keeps a copy. A model whose window is too small for the program's first question gets a preset with
    a larger one, which nobody else uses.
    """
    wanted = AGENTS[agent]
    target = _target(client, model or "")
    if wanted.window:
        target = _suited(client, agent, wanted, target, yes=yes, dry_run=dry_run)
    start = wanted.start(target)
    if not start.command:
        for name, value in start.variables.items():
            output.say(f"export {name}={quote(value)}")
        return
    text, earlier = _merged(start) if start.file else ("", None)
    command = [*start.command, *arguments]
    if dry_run:
        if start.file:
            output.say(f"{start.file}:\n{text}")
        shown = [f"{name}={quote(value)}" for name, value in start.variables.items()]
        output.say(" ".join([*shown, join(command)]))
        return
    program = _program(agent, start)
    if start.file:
        _write(start.file, text, earlier)
    kept = {name: value for name, value in os.environ.items() if name not in start.unset}
    os.execve(program, command, {**kept, **start.variables})


def _program(agent: str, start: AgentLaunch) -> str:
    program = shutil.which(start.command[0])
    if program is None:
        raise ModelRunnerError(
            f"{start.command[0]} is not installed, or not on the PATH: `modelrunner launch {agent} --dry-run` shows "
            "how it would start"
        )
    return program


def _target(client: HttpClient, model: str) -> AgentTarget:
    status = client.call("GET", "/version", wire.Status)
    url = client.host if client.host.startswith("http") else status.listen
    if not url:
        raise ModelRunnerError(
            "programs need a TCP port, and the daemon has none: set `listen` (`modelrunner help configuration`)"
        )
    return AgentTarget(url, model, os.environ.get("MODELRUNNER_API_KEY") or "none", 0)


def _suited(
    client: HttpClient, name: str, agent: Agent, target: AgentTarget, *, yes: bool, dry_run: bool
) -> AgentTarget:
    """Returns the target with a model that can do what the agent asks for, or with a preset of it. Raises
    `ModelRunnerError` that says what is missing, and `click.UsageError` where the user has to choose."""
    models = [each for each in client.call("GET", "/models", list[wire.Model]) if not each.name.startswith(_PRESETS)]
    suited = [model for model in models if not _lack(agent, model)]
    several: list[wire.Model] = []
    if target.model:
        model = client.call("GET", path("models", target.model), wire.Model)
        chosen = target.model
    else:
        candidates = suited or [model for model in models if "chat" in model.capabilities]
        if not candidates:
            raise click.UsageError(
                "no model here chats: pull one (`modelrunner help clients`), or name it: --model MODEL"
            )
        model = _largest(client, candidates)
        several, chosen = candidates if len(candidates) > 1 else [], model.name
    if lack := _lack(agent, model):
        others = f"none of the models here can do it: `modelrunner pull {_ABLE}` gets one that can"
        if suited:
            others = (
                f"of the models here {_listed(suited)} can do it: `modelrunner launch {name} --model {suited[0].name}`"
            )
        raise ModelRunnerError(f"{name} cannot work with {chosen}, {lack}; {others}")
    window = model.context_window or _trained(model) or 4096
    preset = f"{_PRESETS}{name}-{re.sub('[^a-z0-9]+', '-', chosen.lower()).strip('-')}"
    notes, start = [], chosen
    if several:
        notes.append(f"{_listed(several)} can work with {name}, and {chosen} is the largest of them that fits")
    if window < agent.window:
        notes.append(f"{name}'s first question needs a window of {agent.window:,} tokens, and {chosen} has {window:,}")
        start = f"the preset {preset}, which has them"
    if not dry_run:
        _program(name, agent.start(target))
    if notes and not dry_run:
        _agreed("; ".join(notes), start, yes=yes)
    sees = "vision" in model.capabilities
    if not sees and not dry_run:
        output.note(f"{chosen} sees no images: {name} can show it none")
    if window >= agent.window:
        return AgentTarget(target.url, chosen, target.key, window, sees)
    if not dry_run:
        _make(client, chosen, preset, agent.window)
    return AgentTarget(target.url, preset, target.key, agent.window, sees)


def _largest(client: HttpClient, models: list[wire.Model]) -> wire.Model:
    """Returns the model that needs the most memory among those that can be loaded here, the first one if none can."""
    needs: dict[str, int] = {}
    for model in models if len(models) > 1 else ():
        try:
            fit = client.call("GET", f"{path('models', model.name)}/fit", wire.Fit)
        except ModelRunnerError:  # such as for an engine that is not installed
            continue
        if fit.fits != "never" and fit.needed is not None:
            needs[model.name] = fit.needed.ram + sum(fit.needed.vram)
    return max(models, key=lambda model: needs.get(model.name, -1))


def _trained(model: wire.Model) -> int:
    """Returns the size of the context for which the model was trained, in tokens, 0 if it is not known."""
    size = model.config.get("context_size") if isinstance(model.config, dict) else None
    return size if isinstance(size, int) else 0


def _lack(agent: Agent, model: wire.Model) -> str:
    """Returns why the model cannot do what the agent asks for, "" if it can."""
    if "chat" not in model.capabilities:
        return "which does not chat"
    if agent.tools and "tools" not in model.capabilities:
        return "whose chat template has no tools, by which it does its work"
    if 0 < (trained := _trained(model)) < agent.window:
        return f"which was trained for {trained:,} tokens, and the first question needs {agent.window:,}"
    return ""


def _listed(models: list[wire.Model]) -> str:
    return ", ".join(model.name for model in models[:_SHOWN])


def _agreed(note: str, start: str, *, yes: bool) -> None:
    """Asks the user. Raises `ModelRunnerError` without a terminal, and `click.Abort` for a no."""
    if yes:
        return
    if not (sys.stdin and sys.stdin.isatty() and output.is_terminal(sys.stderr)):
        raise ModelRunnerError(f"{note}: with --yes it starts with {start}; --model names another one")
    if not click.confirm(f"{note}. Start it with {start}?", default=True, err=True):
        raise click.Abort


def _make(client: HttpClient, model: str, preset: str, window: int) -> None:
    """Makes the preset. Raises `ModelRunnerError` if it does not fit into memory, or the configuration gives it a
    smaller window; then it is gone again."""
    client.fetch("POST", f"{path('models', model)}/repackage", {"target": preset, "context_size": window})
    fit = client.call("GET", f"{path('models', preset)}/fit", wire.Fit)
    size = client.call("GET", path("models", preset), wire.Model).context_window or window
    problem = fit.reason if fit.fits == "never" else ""
    if size < window:
        problem = f"the configuration gives it {size:,}: `modelrunner config` shows where"
    if problem:
        client.fetch("DELETE", path("models", preset))
        raise ModelRunnerError(f"{model} cannot have a window of {window:,} tokens here: {problem}")
    output.note(f"{preset} is {model} with a window of {window:,} tokens; `modelrunner rm {preset}` removes it")


def _merged(launch: AgentLaunch) -> tuple[str, bytes | None]:
    """Returns the text to write, and the file's present text, None without a file."""
    assert launch.file is not None
    try:
        earlier = launch.file.read_bytes()
        settings = json.loads(earlier)
    except FileNotFoundError:
        earlier, settings = None, {}
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        fragment = json.dumps(launch.content, indent=2)
        raise ModelRunnerError(
            f"{launch.file} is not plain JSON, so it is not changed: add {fragment} yourself (`modelrunner help cli`)"
        )
    return json.dumps(_over(settings, launch.content), indent=2, ensure_ascii=False) + "\n", earlier


def _over(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: _over(old[name], new[name]) for name in new if isinstance(old.get(name), dict)}
    return {**old, **new, **both}


def _write(file: Path, text: str, earlier: bytes | None) -> None:
    if earlier == text.encode():
        return
    file = file.resolve()  # a link stays, as to a folder of configurations
    file.parent.mkdir(parents=True, exist_ok=True)
    if earlier is not None:
        number = 1
        while (copy := file.with_name(f"{file.name}.before-modelrunner-{number}")).exists():
            number += 1
        copy.write_bytes(earlier)
        output.note(f"the earlier {file} is kept as {copy}")
    beside = file.with_name(f".{file.name}.modelrunner")
    beside.write_text(text, "utf-8")
    beside.chmod(0o600)
    beside.replace(file)
    output.note(f"wrote {file}")
