"""The commands that change the settings of models, and that read the configuration file again."""

import re
from pathlib import Path
from typing import Any

import click
import msgspec

from modelrunner import lora, wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, decode, path
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.config.modelconfig import MEANINGS

_NUMBERS = ("context_size", "min_context_size", "parallel", "gpu_layers", "draft_tokens", "max_tokens")
# The field of each option with another name; a dot leads into a table.
_FIELDS = {
    "keep_alive": "keep_alive",
    "runtime_flags": "raw-runtime-flags",
    "draft_model": "speculative.draft_model",
    "draft_ngram": "speculative.ngram",
    "draft_mtp": "speculative.mtp",
    "draft_tokens": "speculative.num_tokens",
    "draft_min_acceptance": "speculative.min_acceptance_rate",
}
_WAYS = ("draft_model", "draft_ngram", "draft_mtp")
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")
_REPLICAS = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_WORDS = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}


@click.command()
@click.argument("model")
@click.argument("flags", nargs=-1, metavar="[-- FLAG]...")
@click.option(
    "--context-size",
    metavar="N",
    help=MEANINGS["context-size"],
)
@click.option("--min-context-size", metavar="N", help=MEANINGS["min-context-size"])
@click.option("--parallel", metavar="N", help=MEANINGS["parallel"])
@click.option("--gpu-layers", metavar="N", help=MEANINGS["gpu-layers"])
@click.option("--keep-alive", metavar="DURATION", help=MEANINGS["keep_alive"])
@click.option("--max-tokens", metavar="N", help=MEANINGS["max-tokens"])
@click.option("--max-seconds", metavar="N", help=MEANINGS["max-seconds"])
@click.option("--runtime-flags", metavar="FLAGS", help="Flags of the engine, as one argument; or give them after --.")
@click.option("--backend", metavar="NAME", help=MEANINGS["backend"])
@click.option(
    "--chat-template", metavar="FILE", help="A chat template in Jinja, instead of the model's own; for tools, or roles."
)
@click.option(
    "--lora",
    "adapters",
    multiple=True,
    metavar="PATH[:SCALE]",
    help="A LoRA adapter: a GGUF file, or for vLLM a PEFT folder. May be given several times.",
)
@click.option("--hosts", metavar="NAME,...", help=MEANINGS["hosts"])
@click.option("--draft-model", metavar="MODEL", help="A small model, or an EAGLE head, that proposes tokens.")
@click.option("--draft-mtp", metavar="on|off", help="Let the model's own heads (MTP) propose tokens.")
@click.option(
    "--draft-ngram",
    metavar="on|off|auto",
    help="Propose what followed the same words before: for edits, JSON; auto: where it was measured to pay.",
)
@click.option("--tune", metavar="auto", help=MEANINGS["tune"])
@click.option("--draft-tokens", metavar="N", help="The number of tokens to propose at once.")
@click.option("--draft-min-acceptance", metavar="P", help="Propose only tokens of this probability.")
@click.option("--pin", metavar="on|off", help=MEANINGS["pin"])
@click.option("--preload", metavar="on|off", help=MEANINGS["preload"])
@click.option("--hours", metavar="HH:MM-HH:MM", help=MEANINGS["hours"])
@click.option("--replicas", metavar="N|MIN-MAX", help=MEANINGS["replicas"])
@click.option("--fallback", metavar="MODEL", help=MEANINGS["fallback"])
@click.option("--recording", metavar="on|off", help=MEANINGS["recording"])
@click.option(
    "--set",
    "tables",
    multiple=True,
    metavar="TABLE.KEY=VALUE",
    help="A value of a table: llamacpp.save-slots=false, parameters.set.temperature=0.2, or "
    "template-arguments.enable_thinking=false.",
)
@click.option(
    "--mode",
    metavar="MODE",
    help="Change it for this kind of request only: completion, embedding, reranking, or one that a backend brings.",
)
@click.option(
    "--restart", is_flag=True, help="Apply it now, with a new runner before the old one ends; else from its next load."
)
@json_option
@with_client()
def configure(
    client: HttpClient,
    model: str,
    flags: tuple[str, ...],
    adapters: tuple[str, ...],
    tables: tuple[str, ...],
    mode: str | None,
    restart: bool,
    as_json: bool,
    **options: str | None,
) -> None:
    """Show or change the configuration of a model.

    "default" resets a value. Without an option the configuration is shown.
    """
    changes: dict[str, Any] = {}
    for name, text in options.items():
        if text is not None:
            _put(changes, _FIELDS.get(name, name.replace("_", "-")), _value(name, text))
    ways = [_value(name, text) for name in _WAYS if (text := options[name]) is not None]
    chosen = [way for way in ways if way not in (None, False)]
    auto = len(chosen) == 1 and (options["draft_ngram"] or "").lower() == "auto"
    if chosen and not auto:  # it takes the place of another one; the daemon refuses two
        changes["speculative"] = {_FIELDS[name].partition(".")[2]: None for name in _WAYS} | changes["speculative"]
    elif ways:
        if any(options[name] not in (None, "default") for name in ("draft_tokens", "draft_min_acceptance")):
            raise click.UsageError(
                "--draft-tokens and --draft-min-acceptance go with --draft-model, --draft-mtp on or --draft-ngram on: "
                "auto drafts as it was measured, off not at all"
            )
        changes["speculative"] = "auto" if auto else None
    for table in tables:
        name, equals, text = table.partition("=")
        if not equals or "." not in name:
            raise click.UsageError(f"--set takes TABLE.KEY=VALUE, not {table!r}")
        _put(changes, name, None if text == "default" else _json(text))
    if adapters:
        changes["lora"] = None if adapters == ("default",) else [_absolute(adapter) for adapter in adapters]
    if flags:
        changes["runtime-flags"] = list(flags)
    if changes or restart:
        how = ({"mode": mode} if mode else {}) | ({"apply": "restart"} if restart else {})
        client.fetch("POST", "/engines/_configure", {"model": model, **how, **changes}, timeout=None)
    _show(client, model, as_json)


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show the changes.")
@json_option
@with_client(start=False)
def reload(client: HttpClient, dry_run: bool, as_json: bool) -> None:
    """Read the configuration file again.

    A runner whose model's settings changed ends after its last request, and the next request starts a new one. Other
    runners go on.
    """
    raw = client.fetch("POST", "/engines/reload", wire.ReloadRequest(dry_run), timeout=None)
    done = decode(raw, wire.ReloadResponse)
    if as_json:
        output.json(raw)
    elif done.changes:
        output.table(("SETTING", "WAS", "IS", "EFFECT"), [(c.what, c.from_, c.to, c.effect) for c in done.changes])
    else:
        output.note("nothing has changed")


def _show(client: HttpClient, model: str, as_json: bool) -> None:
    raw = client.fetch("GET", path("engines", "_configure", model=model))
    if as_json:
        output.json(raw)
        return
    configurations = decode(raw, list[wire.Configuration])
    if configurations and configurations[0].alias:
        output.note(f"{model} is an alias: these are the settings of {configurations[0].model}, which answers for it")
    for shown in configurations:
        if shown is not configurations[0]:
            output.say("")
        output.fields([("model", shown.model), ("mode", shown.mode or "all"), ("revision", str(shown.revision))])
        effect = shown.effective or {}
        rows = [
            (
                name,
                *(
                    _shown(name, values[name]) if name in values else ""
                    for values in (shown.config, shown.file, effect)
                ),
            )
            for name in {**effect, **shown.config, **shown.file}
        ]
        output.table(("SETTING", "CONFIGURED", "CONFIG.TOML", "IN EFFECT"), rows)
        if shown.problem:
            output.note(f"{shown.model} cannot run with it: {shown.problem}")


def _put(changes: dict[str, Any], name: str, value: Any) -> None:
    *tables, key = name.split(".")
    for table in tables:
        changes = changes.setdefault(table, {})
        if not isinstance(changes, dict):
            raise click.UsageError(
                f"{name} is a part of {table}, which another option sets as a whole: give one of them"
            )
    changes[key] = value


def _value(name: str, text: str) -> Any:
    if text == "default":
        return None
    if name == "chat_template":
        return _template(text)
    if name == "hosts":
        return text.split(",")
    if name in _NUMBERS:
        if not _WHOLE_NUMBER.fullmatch(text):
            raise click.UsageError(f"--{name.replace('_', '-')} must be a number, or default")
        return int(text)
    if name == "replicas":
        if not (match := _REPLICAS.fullmatch(text)):
            raise click.UsageError("--replicas must be a number, MIN-MAX, or default")
        return int(match[1]) if match[2] is None else {"min": int(match[1]), "max": int(match[2])}
    if name == "draft_ngram" and text.lower() == "auto":
        return True
    if name in ("pin", "preload", "recording", "draft_ngram", "draft_mtp"):
        if text.lower() not in _WORDS:
            raise click.UsageError(f"--{name.replace('_', '-')} must be on, off, or default")
        return _WORDS[text.lower()]
    return _json(text) if name in ("draft_min_acceptance", "max_seconds") else text


def _absolute(adapter: str) -> str:
    """Returns the adapter with an absolute path: the daemon has another current folder."""
    place, scale = lora.split(adapter)
    return f"{Path(place).expanduser().absolute()}:{scale:g}"


def _template(name: str) -> str:
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--chat-template must be a text file, or default; {name}: {error}") from None


def _json(text: str) -> Any:
    """Returns the JSON value of the text (a number, true, a list), else the text itself."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _shown(name: str, value: Any) -> str:
    if name == "chat-template":  # pages of text
        return f"{len(value)} characters"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
