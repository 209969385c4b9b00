"""The command launch, which starts a program with this daemon as its API."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join, quote
from typing import Any

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, path
from modelrunner.cli.common_options import with_client
from modelrunner.config.locations import Locations
from modelrunner.errors import ModelRunnerError

_PROVIDER = "modelrunner"


@dataclass(frozen=True, slots=True)
class AgentTarget:
    """The values that an agent needs. `url` is the daemon's, without a path; `context` is in tokens."""

    url: str
    model: str
    key: str
    context: int


@dataclass(frozen=True, slots=True)
class AgentLaunch:
    """The start of a program. `file` is written with `content`; if it has other settings, `content` is merged into
    them. `unset` are variables that would win over `variables`."""

    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    file: Path | None = None
    content: dict[str, Any] = field(default_factory=dict)


def claude(target: AgentTarget) -> AgentLaunch:
    """Returns the start of Claude Code (https://code.claude.com/docs/en/env-vars); its base URL has no `/v1`."""
    tiers = {f"ANTHROPIC_DEFAULT_{tier}_MODEL": target.model for tier in ("OPUS", "SONNET", "HAIKU")}
    address = {"ANTHROPIC_BASE_URL": f"{target.url}/anthropic", "ANTHROPIC_AUTH_TOKEN": target.key}
    return AgentLaunch(["claude"], {**address, "ANTHROPIC_MODEL": target.model, **tiers}, unset=("ANTHROPIC_API_KEY",))


def codex(target: AgentTarget) -> AgentLaunch:
    """Returns the start of Codex (https://developers.openai.com/codex/config-advanced): `-c` overrides config.toml, and
    it asks for responses. Its web search runs at a service, so it is switched off."""
    provider = f"model_providers.{_PROVIDER}"
    settings = {
        "model": target.model,
        "model_context_window": target.context,
        "model_provider": _PROVIDER,
        "web_search": "disabled",
        f"{provider}.name": _PROVIDER,
        f"{provider}.base_url": f"{target.url}/v1",
        f"{provider}.env_key": "MODELRUNNER_API_KEY",
        f"{provider}.wire_api": "responses",
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return AgentLaunch(["codex", *options], {"MODELRUNNER_API_KEY": target.key})


def opencode(target: AgentTarget) -> AgentLaunch:
    """Returns the start of OpenCode (https://opencode.ai/docs/config and /docs/providers): OPENCODE_CONFIG_CONTENT is
    merged over the files."""
    limit = {
        "context": target.context,
        "output": target.context // 4,
    }  # OpenCode shortens a conversation that exceeds the difference
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _PROVIDER,
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": {target.model: {"name": target.model, "limit": limit}},
    }
    content = {"provider": {_PROVIDER: provider}, "model": f"{_PROVIDER}/{target.model}"}
    return AgentLaunch(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(content)})


def aider(target: AgentTarget) -> AgentLaunch:
    """Returns the start of Aider (https://aider.chat/docs/llms/openai-compat.html)."""
    variables = {"OPENAI_API_BASE": f"{target.url}/v1", "OPENAI_API_KEY": target.key}
    return AgentLaunch(["aider", "--model", f"openai/{target.model}"], variables)


def goose(target: AgentTarget) -> AgentLaunch:
    """Returns the start of Goose (https://goose-docs.ai/docs/guides/environment-variables): the host has no path, which
    is a variable of its own. For its side tasks it would ask for a small model of OpenAI's."""
    variables = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": target.model,
        "GOOSE_FAST_MODEL": target.model,
        "GOOSE_CONTEXT_LIMIT": str(target.context),
        "OPENAI_HOST": target.url,
        "OPENAI_BASE_PATH": "v1/chat/completions",
        "OPENAI_API_KEY": target.key,
    }
    return AgentLaunch(["goose", "session"], variables)


def continue_(target: AgentTarget) -> AgentLaunch:
    """Returns the start of Continue (https://docs.continue.dev/reference): config.yaml, here as JSON, which is YAML
    too, in a file of our own."""
    model = {
        "name": target.model,
        "provider": "openai",
        "model": target.model,
        "apiBase": f"{target.url}/v1",
        "apiKey": target.key,
        "roles": ["chat", "edit", "apply"],
    }
    file = Locations.find().data / "launch" / "continue.yaml"
    content = {"name": _PROVIDER, "version": "1.0.0", "schema": "v1", "models": [model]}
    return AgentLaunch(["cn", "--config", str(file)], file=file, content=content)


def zed(target: AgentTarget) -> AgentLaunch:
    """Returns the start of Zed (https://zed.dev/docs/ai/use-api-access): the provider's name gives the variable of the
    key."""
    model = {"name": target.model, "display_name": target.model, "max_tokens": target.context}
    provider = {"api_url": f"{target.url}/v1", "available_models": [model]}
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    content = {"language_models": {"openai_compatible": {_PROVIDER: provider}}}
    return AgentLaunch(
        ["zed", "."], {"MODELRUNNER_API_KEY": target.key}, file=folder / "zed" / "settings.json", content=content
    )


def open_webui(target: AgentTarget) -> AgentLaunch:
    """Returns the start of Open WebUI (https://docs.openwebui.com/reference/env-configuration)."""
    variables = {"OPENAI_API_BASE_URL": f"{target.url}/v1", "OPENAI_API_KEY": target.key}
    return AgentLaunch(["open-webui", "serve"], variables)


def shell(target: AgentTarget) -> AgentLaunch:
    """Returns the variables that the clients of OpenAI, Anthropic and Ollama read."""
    variables = {
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_API_KEY": target.key,
        "ANTHROPIC_BASE_URL": f"{target.url}/anthropic",
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "OLLAMA_HOST": target.url,
        "OLLAMA_API_KEY": target.key,
    }
    return AgentLaunch([], variables)


AGENTS: dict[str, Callable[[AgentTarget], AgentLaunch]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "aider": aider,
    "goose": goose,
    "continue": continue_,
    "zed": zed,
    "open-webui": open_webui,
    "env": shell,
}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("agent", type=click.Choice(list(AGENTS)), metavar="AGENT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]...")
@click.option("--model", metavar="MODEL", help="The model; by default the only one that can chat.")
@click.option("--dry-run", is_flag=True, help="Only show the file and the command.")
@with_client()
def launch(client: HttpClient, agent: str, arguments: tuple[str, ...], model: str | None, dry_run: bool) -> None:
    """Start a coding agent, or another program, with a model of this machine.

    AGENT is claude, codex, opencode, aider, goose, continue, zed, open-webui, or env, which prints the variables for a
    shell: eval "$(modelrunner launch env)". Further ARGUMENTS go to the program. Before the command changes a file of
    the program, it keeps a copy.
    """
    found = AGENTS[agent](_target(client, model, named=agent not in ("env", "open-webui")))
    if not found.command:
        for name, value in found.variables.items():
            output.say(f"export {name}={quote(value)}")
        return
    text, earlier = _merged(found) if found.file else ("", None)
    command = [*found.command, *arguments]
    if dry_run:
        if found.file:
            output.say(f"{found.file}:\n{text}")
        shown = [f"{name}={quote(value)}" for name, value in found.variables.items()]
        output.say(" ".join([*shown, join(command)]))
        return
    program = shutil.which(command[0])
    if program is None:
        raise ModelRunnerError(
            f"{command[0]} is not installed, or not on the PATH: `modelrunner launch {agent} --dry-run` shows how it "
            "would start"
        )
    if found.file:
        _write(found.file, text, earlier)
    kept = {name: value for name, value in os.environ.items() if name not in found.unset}
    os.execve(program, command, {**kept, **found.variables})


def _target(client: HttpClient, model: str | None, *, named: bool) -> AgentTarget:
    status = client.call("GET", "/version", wire.Status)
    url = client.host if client.host.startswith("http") else status.listen
    if not url:
        raise ModelRunnerError(
            "programs need a TCP port, and the daemon has none: set `listen` (`modelrunner help configuration`)"
        )
    key = os.environ.get("MODELRUNNER_API_KEY") or "none"
    if not named:
        return AgentTarget(url, model or "", key, 0)
    if model is None:
        chatting = [m.name for m in client.call("GET", "/models", list[wire.Model]) if "chat" in m.capabilities]
        if len(chatting) != 1:
            raise click.UsageError(f"name the model: --model {' or '.join(chatting[:5]) or 'MODEL'}")
        model = chatting[0]
    found = client.call("GET", path("models", model), wire.Model)
    return AgentTarget(url, model, key, found.context_window or 4096)


def _merged(found: AgentLaunch) -> tuple[str, bytes | None]:
    """Returns the text to write, and the file's present text, None without a file."""
    assert found.file is not None
    try:
        earlier = found.file.read_bytes()
        settings = json.loads(earlier)
    except FileNotFoundError:
        earlier, settings = None, {}
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        fragment = json.dumps(found.content, indent=2)
        raise ModelRunnerError(
            f"{found.file} is not plain JSON, so it is not changed: add {fragment} yourself (`modelrunner help cli`)"
        )
    return json.dumps(_over(settings, found.content), indent=2, ensure_ascii=False) + "\n", earlier


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
