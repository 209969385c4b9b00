"""How coding agents and other programs are started with this daemon as their API, and what a model needs for them."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelrunner.config.locations import Locations

_PROVIDER = "modelrunner"


@dataclass(frozen=True, slots=True)
class AgentTarget:
    """The values that an agent needs. `url` is the daemon's, without a path; `context` is in tokens; `sees` is true for
    a model that takes images."""

    url: str
    model: str
    key: str
    context: int
    sees: bool = False


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
    """Returns the start of Claude Code (https://code.claude.com/docs/en/env-vars); its base URL has no `/v1`. It takes
    an unknown model's window for one of 1,000,000 tokens, and keeps room for an answer of 20,000 free."""
    tiers = {f"ANTHROPIC_DEFAULT_{tier}_MODEL": target.model for tier in ("OPUS", "SONNET", "HAIKU")}
    address = {"ANTHROPIC_BASE_URL": f"{target.url}/anthropic", "ANTHROPIC_AUTH_TOKEN": target.key}
    window = {
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(target.context // 8, 20_000)),
    }
    variables = {**address, "ANTHROPIC_MODEL": target.model, **tiers, **window}
    return AgentLaunch(["claude"], variables, unset=("ANTHROPIC_API_KEY",))


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
    modalities = {"input": ["text", "image"] if target.sees else ["text"], "output": ["text"]}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _PROVIDER,
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": {target.model: {"name": target.model, "limit": limit, "modalities": modalities}},
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
        "capabilities": ["tool_use", "image_input"] if target.sees else ["tool_use"],
    }
    file = Locations.find().data / "launch" / "continue.yaml"
    content = {"name": _PROVIDER, "version": "1.0.0", "schema": "v1", "models": [model]}
    return AgentLaunch(["cn", "--config", str(file)], file=file, content=content)


def zed(target: AgentTarget) -> AgentLaunch:
    """Returns the start of Zed (https://zed.dev/docs/ai/use-api-access): the provider's name gives the variable of the
    key."""
    model = {
        "name": target.model,
        "display_name": target.model,
        "max_tokens": target.context,
        "capabilities": {"images": target.sees},
    }
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


@dataclass(frozen=True, slots=True)
class Agent:
    """`window` is in tokens: room for its first question and an answer, 0 for a program that asks what its user writes.
    With `tools` it does its work by the tools that a model calls."""

    start: Callable[[AgentTarget], AgentLaunch]
    window: int = 0
    tools: bool = False


AGENTS: dict[str, Agent] = {
    "claude": Agent(claude, 32_768, tools=True),
    "codex": Agent(codex, 16_384, tools=True),
    "opencode": Agent(opencode, 16_384, tools=True),
    "aider": Agent(aider, 8_192),
    "goose": Agent(goose, 16_384, tools=True),
    "continue": Agent(continue_, 16_384, tools=True),
    "zed": Agent(zed, 16_384, tools=True),
    "open-webui": Agent(open_webui),
    "env": Agent(shell),
}
"""docs/clients.md has the tokens that were counted for each."""
