"""A configuration of llama-swap becomes a part of ours, and what has no counterpart is named."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.cli.llamaswap import converted
from modelrunner.config.locations import Locations
from modelrunner.config.settings import Settings
from modelrunner.errors import BadRequest
from tests.cli.conftest import Cli

SWAP = """
healthCheckTimeout: 500
startPort: 10001
logToStdout: both
globalTTL: 300
unloadTimeout: 20
macros:
  "latest-llama": >
    /opt/llama-server --port ${PORT}
  "default_ctx": 4096
  "args": "--ctx-size ${default_ctx}"
apiKeys: ["sk-1"]
models:
  "Small:Q4":
    macros: {default_ctx: 1024}
    cmd: |
      # a comment
      ${latest-llama}
      --model ${env.MODELS}/small.gguf ${args}
      --alias ${MODEL_ID}
    env: ["CUDA_VISIBLE_DEVICES=0,1"]
    ttl: 60
    aliases: ["gpt-4o-mini"]
    useModelName: "org/small"
    filters: {stripParams: "temperature, top_p", setParams: {seed: 3, top_p: 0.9}, setParamsByID: {}}
    capabilities: {in: [text, image], out: [text], tools: true, context: 32000}
  box:
    proxy: "http://127.0.0.1:9999"
    checkEndpoint: none
    cmd: docker run --name ${MODEL_ID} -p 9999:8080 image
    cmdStop: docker stop ${MODEL_ID}
    ttl: 0
  vectors:
    cmd: llama-server --port ${PORT} -m e.gguf --embedding
    filters: {strip_params: "seed"}
    concurrencyLimit: 3
groups:
  forever: {persistent: true, members: [vectors]}
  others: {members: [box]}
selectors:
  best: {strategy: warm, targets: ["Small:Q4", box]}
  spread: {strategy: spillover, targets: [box], settings: {spillover: 4}}
hooks: {on_startup: {preload: [box], profile: coding}}
profiles: {coding: {pins: {a: box}}}
routing: {scheduler: {use: fifo}}
peers:
  tail: {proxy: "tailcat://token", models: [b]}
  x: {proxy: "http://10.0.0.1", models: [a], apiKey: "sk-secret", filters: {}}
"""


def convert(text: str) -> tuple[dict[str, Any], list[str]]:
    toml, notes = converted(text.encode(), {"MODELS": "/models"})
    return tomllib.loads(toml), notes


def test_every_key_comes_over_or_is_named() -> None:
    ours, notes = convert(SWAP)
    small, box, vectors = ours["engines"]["small-q4"], ours["engines"]["box"], ours["engines"]["vectors"]
    assert small["command"] == [
        *("/opt/llama-server", "--port", "{port}", "--model", "/models/small.gguf", "--ctx-size", "1024"),
        *("--alias", "Small:Q4"),
    ]
    assert small["environment"] == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert small["ready"] == {"path": "/health", "within": "500s"}
    assert small["stop"] == {"grace": "20s"}
    assert small["model-name"] == "org/small"
    capabilities = ["chat", "completion", "vision", "tools"]
    assert small["models"] == [{"name": "Small:Q4", "capabilities": capabilities, "context-size": 32000}]
    assert box["command"] == ["docker", "run", "--name", "box", "-p", "{port}:8080", "image"]
    assert box["stop"]["command"] == ["docker", "stop", "box"]
    assert "path" not in box["ready"]
    assert vectors["modes"] == ["embedding"]
    assert ours["models"] == {
        "Small:Q4": {
            "keep_alive": "60s",
            "parameters": {"strip": ["temperature", "top_p"], "set": {"seed": 3, "top_p": 0.9}},
        },
        "box": {"keep_alive": "-1", "preload": True},
        "vectors": {"keep_alive": "300s", "parameters": {"strip": ["seed"]}, "pin": True},
    }
    assert ours["aliases"]["gpt-4o-mini"] == "Small:Q4"
    assert ours["aliases"]["best"] == {"models": ["Small:Q4", "box"], "policy": "loaded"}
    assert ours["engines"]["x"] == {"url": "http://10.0.0.1", "key-env": "KEY_X"}
    assert ours["aliases"]["a"] == "x/a"
    assert "sk-secret" not in str((ours, notes))
    more = (
        "routing.scheduler",
        "peers.tail",
        "startPort",
        "logToStdout",
        "profiles",
        "hooks.on_startup.profile",
        "selectors.spread.settings",
        "spread.strategy",
    )
    for named in (
        *more,
        "filters.setParamsByID",
        "vectors.concurrencyLimit",
        "apiKeys",
        "groups.others",
        "peers.x.filters",
    ):
        assert any(named in note for note in notes), named


@pytest.mark.parametrize("key", ["stripParams", "strip_params", "setParams"])
def test_a_filter_without_a_value_changes_nothing(key: str) -> None:
    ours, _ = convert(f"models: {{a: {{cmd: 'x ${{PORT}}', filters: {{{key}: }}}}}}")
    assert "parameters" not in ours["models"]["a"]


def test_the_command_prints_a_file_that_the_daemon_takes(
    cli: Cli, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELS", "/models")
    (folders / "swap.yaml").write_text(SWAP)
    unnamed = cli("import", "llama-swap")
    assert (unnamed.code, "import llama-swap FILE" in unnamed.err) == (2, True)
    result = cli("import", "llama-swap", str(folders / "swap.yaml"))
    assert result.code == 0, result.err
    assert "apiKeys" in result.err
    (folders / "config.toml").write_text('log_level = "info"' + result.out)  # appended to a line without an end
    settings = Settings.load(Locations.find())
    assert set(settings.engines) == {"small-q4", "box", "vectors", "x"}
    assert not (folders / "data").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "no YAML"),
        ("a:\n" + "[" * 101, "more than 100 brackets are open at line 2"),
        ("- 1", "must be a table"),
        ("models: {}", "no `models`"),
        ("models: {a: 3}", "models.a must be a table"),
        ("models: {a: {cmd: ''}}", "there is no command"),
        ('models: {a: {cmd: "x \'"}}', "models.a.cmd"),
        ("models: {a: {cmd: 'x ${nothing}'}}", "there is no macro ${nothing}"),
        ("models: {a: {cmd: 'x ${env.NOTHING}'}}", "NOTHING is not set"),
        ("macros: {a: '${b}', b: '${a}'}\nmodels: {a: {cmd: '${a}'}}", "have no end"),
        ("macros: {a: '${a}${a}${a}${a}'}\nmodels: {a: {cmd: '${a}'}}", "have no end"),
        ("models: {a: {cmd: x, ttl: soon}}", "models.a.ttl must be a whole number"),
    ],
)
def test_what_is_no_such_file_is_said_with_its_place(text: str, said: str) -> None:
    with pytest.raises(BadRequest) as wrong:
        convert(text)
    assert said in wrong.value.message


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 1500))


@pytest.mark.parametrize(
    "model", ["cmd: {}", "cmd: x, env: [{}]", "cmd: x, filters: {{setParams: {{a: {}}}}}", "{}: 1"]
)
@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (BOMB, "*a8", "its aliases stand for more than 4 MiB"),
        ("a: &a " + "x" * 100_000 + f"\nb: &b [{'*a, ' * 100}]\n", "*b", "its aliases stand for more than 4 MiB"),
        ("b: &b [&a [*b, *b]]\n", "*a", "the alias *b stands in itself"),
    ],
)
def test_aliases_that_stand_for_any_number_of_values(model: str, text: str, name: str, said: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(said)):
        convert(f"{text}models: {{m: {{{model.format(name)}}}}}")


@pytest.mark.parametrize("model", ["cmd: *a1499", "cmd: x, filters: {setParams: {a: *a1499}}"])
def test_lists_that_stand_too_deep_in_each_other(model: str) -> None:
    with pytest.raises(BadRequest, match="stand too deep in each other"):
        convert(f"{CHAIN}models: {{m: {{{model}}}}}")


def test_aliases_are_read() -> None:
    ours, _ = convert("base: &base {ttl: 60, env: [A=1]}\nmodels: {a: {<<: *base, cmd: x}, b: {<<: *base, cmd: y}}")
    assert [engine["environment"] for engine in ours["engines"].values()] == [{"A": "1"}] * 2
    assert {model["keep_alive"] for model in ours["models"].values()} == {"60s"}


def test_a_file_that_is_too_large_is_not_read() -> None:
    with pytest.raises(BadRequest, match="more than 1 MiB"):
        converted(b"#" * (1 << 20) + b"##")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
_KEYS = ("cmd", "cmdStop", "proxy", "env", "aliases", "ttl", "checkEndpoint", "useModelName", "filters", "capabilities")


@given(st.dictionaries(st.text(max_size=8), st.dictionaries(st.sampled_from(_KEYS), _VALUES), min_size=1, max_size=3))
def test_whatever_the_keys_hold_it_is_toml_or_refused(models: dict[str, Any]) -> None:
    import yaml

    try:
        text, _ = converted(yaml.safe_dump({"models": models}).encode(), {})
    except BadRequest:
        return
    assert set(tomllib.loads(text)) <= {"engines", "models", "aliases"}
