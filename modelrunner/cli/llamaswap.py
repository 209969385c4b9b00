"""Reads a configuration of llama-swap, and says it in ours.

The keys are those of https://github.com/mostlygeek/llama-swap/blob/main/docs/config.example.yaml, of August 2026."""

import json
import os
import re
import shlex
from collections import ChainMap
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from modelrunner.errors import BadRequest

MOST_BYTES = 1 << 20
"""The size of the largest file that is read."""
_MACRO = re.compile(r"\$\{([A-Za-z0-9_.-]{1,80})\}")
_DEEPEST = 16
"""How often macros may stand in each other."""
_MOST_BRACKETS = 100
"""How many may be open at once: PyYAML's work grows with their square, and what llama-swap reads has a few."""
_MOST_WRITTEN = 4 * MOST_BYTES
"""The characters and values of a file whose aliases (`*NAME`) are written out: a few bytes can stand for any number."""
_WITHOUT = {
    "concurrencyLimit": "requests wait here, at most `max_queue` of them",
    "unlisted": "every model is listed",
    "metadata": "",
    "name": "",
    "description": "",
    "sendLoadingState": "clients get comments in the stream while a model loads",
    "timeouts": "see `max_wait`, `max_seconds`, `wedge_limit` and the model's `max-seconds`",
    "compat": "",
    "startPort": "each run gets a free port",
    "includeAliasesInList": "aliases are listed",
    "logLevel": "see `log_level`",
    "captureBuffer": "see the model's `recording`",
    "matrix": "models stay loaded beside each other while they fit",
}
"""Keys without a counterpart, and what is there instead."""
_READ = frozenset(
    (
        *("models", "macros", "globalTTL", "healthCheckTimeout", "unloadTimeout", "groups", "routing", "hooks"),
        *("selectors", "apiKeys", "peers"),
    )
)
_KNOWN = {
    *("cmd", "cmdStop", "proxy", "env", "aliases", "ttl", "checkEndpoint", "useModelName", "filters", "macros"),
    *("capabilities", "unloadTimeout"),
}
_CAPABILITIES = {"in", "out", "tools", "reranker", "context"}
_INPUTS = {"image": "vision", "audio": "audio"}


class _Loader(yaml.SafeLoader):
    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._written = 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event, before = self.peek_event(), self._written  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        if not isinstance(event, yaml.AliasEvent):
            self._written += 1 + (len(event.value) if isinstance(event, yaml.ScalarEvent) else 0)
            self._sizes[event.anchor] = self._written - before
        elif event.anchor in self._sizes:
            self._written += self._sizes[event.anchor]
        else:
            raise yaml.YAMLError(f"the alias *{event.anchor} stands in itself")
        if self._written > _MOST_WRITTEN:
            raise yaml.YAMLError(f"its aliases stand for more than {_MOST_WRITTEN >> 20} MiB")
        return node

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level >= _MOST_BRACKETS:
            raise yaml.YAMLError(f"more than {_MOST_BRACKETS} brackets are open at line {self.line + 1}")
        super().fetch_flow_collection_start(TokenClass)


class _Conversion:
    """One file: the lines of ours, and notes about what has no counterpart."""

    def __init__(self, source: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self._source = source
        self._environ = environ
        self._room = MOST_BYTES  # characters that macros may still become
        self.lines: list[str] = []
        self.notes: list[str] = []
        self._models: dict[str, dict[str, Any]] = {}
        self._macros: dict[str, str] = {}
        self._aliases: dict[str, Any] = {}
        self._engines: set[str] = set()

    def run(self) -> None:
        source = self._source
        macros = _table(source.get("macros"), "macros")
        self._macros = {str(name): str(value) for name, value in macros.items()}
        for id, model in _table(source.get("models"), "models").items():
            self._model(str(id), _table(model, f"models.{id}"))
        self._groups()
        startup = _table(_table(source.get("hooks"), "hooks").get("on_startup"), "hooks")
        self._name(startup.keys() - {"preload"}, "hooks.on_startup.")
        for id in _list(startup.get("preload")):
            self._models.setdefault(str(id), {})["preload"] = True
        for id, selector in _table(source.get("selectors"), "selectors").items():
            table = _table(selector, f"selectors.{id}")
            self._name(table.keys() - {"strategy", "targets"}, f"selectors.{id}.")
            if table.get("strategy") not in ("pin", "warm"):
                self.notes.append(f"selectors.{id}.strategy: the first of its models that is loaded answers")
            policy = "first" if table.get("strategy") == "pin" else "loaded"
            self._aliases[str(id)] = {"models": [str(one) for one in _list(table.get("targets"))], "policy": policy}
        if source.get("apiKeys"):
            self.notes.append("apiKeys: make each client a key of its own with `modelrunner keys create NAME`")
        for name, peer in _table(source.get("peers"), "peers").items():
            self._peer(str(name), _table(peer, f"peers.{name}"))
        self._name(source.keys() - _READ)
        for id, settings in self._models.items():
            self.lines += [f"[models.{_text(id)}]", *_assignments(settings), ""]
        if self._aliases:
            self.lines += ["[aliases]", *(f"{_text(name)} = {_value(value)}" for name, value in self._aliases.items())]

    def _model(self, id: str, model: Mapping[str, Any]) -> None:
        macros = _table(model.get("macros"), f"models.{id}.macros")
        own = {str(name): str(value) for name, value in macros.items()} | {"MODEL_ID": id, "PORT": "{port}"}
        values = ChainMap(own, self._macros)

        def said(text: Any) -> str:
            return self._expanded(str(text), values, id)

        table: dict[str, Any] = {"command": _words(said(model.get("cmd", "")), f"models.{id}.cmd")}
        port = str(model.get("proxy", "")).rpartition(":")[2].rstrip("/")
        if not any("{port}" in word for word in table["command"]):
            table["command"] = [re.sub(rf"\b{port}\b", "{port}", w) if port.isdigit() else w for w in table["command"]]
        if not any("{port}" in word for word in table["command"]):
            self.notes.append(f"models.{id}.cmd: has no port: put {{port}} where the program takes it")
        table["models"] = [{"name": id, **self._capabilities(_table(model.get("capabilities"), id))}]
        if modes := self._modes(table["command"]):
            table["modes"] = modes
        if env := [said(one) for one in _list(model.get("env"))]:
            table["environment"] = {name: value for name, _, value in (one.partition("=") for one in env)}
        ready = {} if model.get("checkEndpoint") == "none" else {"path": said(model.get("checkEndpoint", "/health"))}
        limit = _number(self._source.get("healthCheckTimeout", 120), "healthCheckTimeout")
        table["ready"] = {**ready, "within": f"{max(15, limit)}s"}
        grace = _number(model.get("unloadTimeout") or self._source.get("unloadTimeout", 10), "unloadTimeout")
        table["stop"] = {"grace": f"{max(1, grace)}s"}
        if model.get("cmdStop"):
            table["stop"]["command"] = _words(said(model["cmdStop"]), f"models.{id}.cmdStop")
        if model.get("useModelName"):
            table["model-name"] = said(model["useModelName"])
        name = self._engine_name(id)
        self.lines += [f"[engines.{_text(name)}]", *_assignments(table), ""]
        self._settings(id, model)

    def _settings(self, id: str, model: Mapping[str, Any]) -> None:
        ttl = _number(model.get("ttl", -1), f"models.{id}.ttl")
        ttl = ttl if ttl >= 0 else _number(self._source.get("globalTTL", 0), "globalTTL")
        self._models.setdefault(id, {})["keep_alive"] = f"{ttl}s" if ttl else "-1"
        for alias in _list(model.get("aliases")):
            self._aliases[str(alias)] = id
        filters = _table(model.get("filters"), f"models.{id}.filters")
        stripped = str(filters.get("stripParams") or filters.get("strip_params") or "")  # the second in older files
        strip = [name for word in stripped.split(",") if (name := word.strip())]
        fixed = _table(filters.get("setParams"), f"models.{id}.filters.setParams")
        if strip or fixed:
            parameters = {**({"strip": strip} if strip else {}), **({"set": dict(fixed)} if fixed else {})}
            self._models.setdefault(id, {})["parameters"] = parameters
        self._name(filters.keys() - {"stripParams", "strip_params", "setParams"}, f"models.{id}.filters.")
        self._name(model.keys() - _KNOWN, f"models.{id}.")
        self._name(_table(model.get("capabilities"), id).keys() - _CAPABILITIES, f"models.{id}.capabilities.")

    def _peer(self, id: str, peer: Mapping[str, Any]) -> None:
        address = str(peer.get("proxy", ""))
        if not address.startswith(("http://", "https://")):
            self.notes.append(f"peers.{id}: {address.partition(':')[0] or 'no address'} has no counterpart")
            return
        name, table = self._engine_name(id), {"url": address}
        if peer.get("apiKey"):
            table["key-env"] = re.sub(r"[^A-Z0-9]", "_", f"KEY_{name}".upper())
            self.notes.append(f"peers.{id}.apiKey: put the key into the variable {table['key-env']} of the daemon")
        self.lines += [f"[engines.{_text(name)}]", *_assignments(table), ""]
        self._aliases |= {str(model): f"{name}/{model}" for model in _list(peer.get("models"))}
        self._name(peer.keys() - {"proxy", "apiKey", "models"}, f"peers.{id}.")

    def _groups(self) -> None:
        routing = _table(self._source.get("routing"), "routing")
        router = _table(routing.get("router"), "routing.router")
        settings = _table(router.get("settings"), "routing.router.settings")
        groups = {**_table(self._source.get("groups"), "groups"), **_table(settings.get("groups"), "groups")}
        for name, group in groups.items():
            table = _table(group, f"groups.{name}")
            if table.get("persistent"):
                for member in _list(table.get("members")):
                    self._models.setdefault(str(member), {})["pin"] = True
            else:
                self.notes.append(f"groups.{name}: not needed: models stay loaded beside each other while they fit")
        self._name(settings.keys() - {"groups"}, "routing.router.settings.")
        self._name(routing.keys() - {"router"}, "routing.")

    def _name(self, keys: Iterable[Any], place: str = "") -> None:
        """Names keys without a counterpart."""
        for key in sorted(map(str, keys)):
            what = _WITHOUT.get(key, "")
            self.notes.append(f"{place}{key}: has no counterpart{f'; {what}' if what else ''}")

    def _expanded(self, text: str, macros: Mapping[str, str], id: str) -> str:
        def value(match: re.Match[str]) -> str:
            written = of(match[1])
            self._room -= len(written)
            if self._room < 0:
                raise endless
            return written

        def of(name: str) -> str:
            if name.startswith("env."):
                if name[4:] not in self._environ:
                    raise BadRequest(f"models.{id}: the variable {name[4:]} is not set here")
                return self._environ[name[4:]]
            if name not in macros:
                if name == "PID":
                    self.notes.append(f"models.{id}.cmdStop: ${{PID}} has no counterpart: a signal ends the program")
                    return "{id}"
                raise BadRequest(f"models.{id}: there is no macro ${{{name}}}")
            return macros[name]

        endless = BadRequest(f"models.{id}: its macros have no end")
        for _ in range(_DEEPEST):
            if not _MACRO.search(text):
                return text
            text = _MACRO.sub(value, text)
        raise endless

    def _engine_name(self, id: str) -> str:
        plain = re.sub(r"[^a-z0-9._-]+", "-", id.lower()).strip("-._")[:28] or "engine"
        name = next(n for n in (plain, *(f"{plain}-{i}" for i in range(2, 1000))) if n not in self._engines)
        self._engines.add(name)
        return name

    @staticmethod
    def _capabilities(table: Mapping[str, Any]) -> dict[str, Any]:
        inputs, outputs = map(str, _list(table.get("in"))), set(map(str, _list(table.get("out"))))
        kinds = [*(["chat", "completion"] if "text" in outputs else []), *(_INPUTS[i] for i in inputs if i in _INPUTS)]
        kinds += ["tools"] if table.get("tools") else []
        kinds += ["reranking"] if table.get("reranker") else []
        context = table.get("context")
        size = {"context-size": context} if isinstance(context, int) and context > 0 else {}
        return {**({"capabilities": kinds} if kinds else {}), **size}

    @staticmethod
    def _modes(command: list[str]) -> list[str]:
        if {"--embedding", "--embeddings"} & set(command):
            return ["embedding"]
        return ["reranking"] if {"--rerank", "--reranking"} & set(command) else []


def converted(data: bytes, environ: Mapping[str, str] = os.environ) -> tuple[str, list[str]]:
    """Returns the file as a part of config.toml, and notes about what has no counterpart. Raises `BadRequest` for what
    is no configuration of llama-swap, with the place."""
    if len(data) > MOST_BYTES:
        raise BadRequest(f"the file has more than {MOST_BYTES >> 20} MiB: that is no configuration of llama-swap")
    try:
        source = yaml.load(data, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadRequest(f"the file is no YAML: {' '.join(str(error).split())[:300]}") from None
    table = _table(source, "the file")
    if not table.get("models"):
        raise BadRequest("the file has no `models`: that is no configuration of llama-swap")
    conversion = _Conversion(table, environ)
    try:
        conversion.run()
    except RecursionError:
        raise BadRequest("the file has lists and tables that stand too deep in each other") from None
    return "\n".join(conversion.lines).strip() + "\n", conversion.notes


def _words(text: str, place: str) -> list[str]:
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    try:
        words = shlex.split(" ".join(line.rstrip("\\") for line in lines))
    except ValueError as error:
        raise BadRequest(f"{place}: {error}") from None
    if not words:
        raise BadRequest(f"{place}: there is no command")
    return words


def _table(value: Any, place: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{place} must be a table")
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 1 << 31:
        raise BadRequest(f"{place} must be a whole number of seconds, not {str(value)[:40]!r}")
    return value


def _assignments(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items()]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + " }" if value else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value).lower() if isinstance(value, bool | int | float) else _text(str(value))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(text: str) -> str:
    """Returns a basic string of TOML, which escapes as JSON does, and DEL besides."""
    return json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")
