"""Where settings come from, which one wins, and what a wrong one says."""

import stat
from pathlib import Path

import pytest

from modelrunner.config.locations import MAX_SOCKET_PATH, ConfigurationError, Locations, private_directory
from modelrunner.config.settings import Settings
from modelrunner.types import KeepAlive


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)


def load(config: str = "", environ: dict[str, str] | None = None, **overrides: object) -> Settings:
    """`environ` has the variables without their prefix."""
    variables = {f"MODELRUNNER_{name}": text for name, text in (environ or {}).items()}
    locations = Locations.find(variables)
    locations.config_file.parent.mkdir(parents=True, exist_ok=True)
    locations.config_file.write_text(config)
    return Settings.load(Locations.find(variables), **overrides)


def test_the_command_line_beats_the_environment_beats_the_file() -> None:
    config = 'keep_alive = "1m"\nmax_queue = 7\nlisten = "127.0.0.1:1"\nmemory_budget = "2GiB"'
    environ = {"KEEP_ALIVE": "-1", "LISTEN": "127.0.0.1:2"}
    settings = load(config, environ, listen="127.0.0.1:3")
    assert settings.listen == "127.0.0.1:3"
    assert settings.keep_alive == KeepAlive(float("inf"))
    assert settings.max_queue == 7
    assert settings.memory_budget == 2 << 30


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("KEEP_ALIVE", "1h30m", KeepAlive(5400.0)),
        ("KEEP_ALIVE", "300", KeepAlive(300.0)),
        ("KEEP_ALIVE", "0", KeepAlive(0.0)),
        ("MAX_WAIT", "30", 30.0),
        ("MAX_WAIT", "1m", 60.0),
        ("MEMORY_BUDGET", "8GiB", 8 << 30),
        ("MAX_QUEUE", "3", 3),
        ("ORIGINS", "http://a.example, http://localhost:*", ("http://a.example", "http://localhost:*")),
        ("HOSTS", "a.example", ("a.example",)),
        ("LISTEN", "", ""),
        ("LLAMA_SERVER", "~/llama-server", Path("~/llama-server").expanduser),
        ("SOCKET", "~/mr.sock", Path("~/mr.sock").expanduser),
    ],
)
def test_every_kind_of_setting_can_be_a_variable(name: str, text: str, value: object) -> None:
    assert getattr(load("", {name: text}), name.lower()) == (value() if callable(value) else value)


@pytest.mark.parametrize("name", ["KEEP_ALIVE", "MEMORY_BUDGET", "SOCKET", "LLAMA_SERVER", "ORIGINS"])
def test_an_empty_variable_is_none(name: str) -> None:
    assert load("", {name: ""}).model_dump() == load("").model_dump()


@pytest.mark.parametrize(
    ("name", "text"),
    [("KEEP_ALIVE", "soon"), ("MAX_WAIT", "inf"), ("MAX_QUEUE", "x"), ("MODELS", "x"), ("MEMORY_BUDGET", "0")],
)
def test_a_wrong_variable_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^MODELRUNNER_{name}: {name.lower()}: "):
        load("", {name: text})


@pytest.mark.parametrize("host", ["docker.io", "Registry.Example:5000", "localhost", "127.0.0.1:5000", "[::1]:5000"])
def test_a_registry_has_a_table_of_its_own(host: str) -> None:
    assert load(f'[registries."{host}"]\nplain_http = true').registries[host.lower()].plain_http


def test_a_model_has_a_table_of_its_own() -> None:
    settings = load('[models."ai/smollm2"]\ncontext-size = 2048\nkeep_alive = "10s"')
    assert settings.models["ai/smollm2"].context_size == 2048
    assert settings.models["ai/smollm2"].keep_alive == "10s"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("keep_alive = 'soon'", "keep_alive"),
        ("max_queue = 0", "max_queue"),
        ("max_quue = 3", "max_quue"),
        ("memory_budget = 'much'", "memory_budget"),
        ("max_wait = inf", "max_wait: .* finite"),
        ("max_seconds = 0", "max_seconds"),
        ("stall_limit = nan", "stall_limit"),
        ("keep_alive = = 1", "line 1, column"),
        ('[models."m"]\ncontxt-size = 1', "contxt-size"),
        ('[registries."https://registry.example"]', "registries.*without a scheme or a path"),
        ('[registries."registry.example/team"]', "registries.*without a scheme or a path"),
        ('[registries."registry-1.docker.io"]', r"registries.*its name is docker\.io"),
        ('[registries."hf.co"]', "registries.*it is not a registry"),
        ('[registries."registry.example"]\nkey = []', "registries.*key"),
        ("data_dir = 5", "line 1, column 1: data_dir: 5 is not a path in quotes"),
        ("socket = ['a']", "line 1, column 1: socket: .* is not a path in quotes"),
        ("cache_dir = '~nobody-here/x'", "line 1, column 1: cache_dir: '~nobody-here/x' has no home folder"),
        ("tls_certificate = '~nobody-here/x'", "tls_certificate: '~nobody-here/x' has no home folder"),
        ("model_dirs = ['~nobody-here/x']", "model_dirs.*'~nobody-here/x' has no home folder"),
        ('[registries."registry.example"]\nca = "~nobody-here/x"', "ca: '~nobody-here/x' has no home folder"),
        ('data_dir = "a\\u0000"', "data_dir: .* has a NUL"),
        (f"max_queue = {'9' * 5000}", "cannot be read"),
        (f"max_queue = {'[' * 5000}", "cannot be read"),
        (f"max_wait = {'9' * 400}", "max_wait: the number is too large"),
        (f"memory_budget = {'9' * 400}", "memory_budget: .* is not a size"),
        ('[aliases]\na = { models = ["m"], families = [["openai"]] }', "families must be some of"),
    ],
)
def test_a_wrong_setting_is_named(config: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load(config)


def test_two_data_directories_never_share_a_socket(tmp_path: Path) -> None:
    one = Locations.find({"MODELRUNNER_DATA_DIR": str(tmp_path / "one")})
    two = Locations.find({"MODELRUNNER_DATA_DIR": str(tmp_path / "two")})
    assert one.socket != two.socket
    assert one.host == f"unix://{one.socket}"


def test_a_deep_runtime_directory_does_not_make_the_socket_path_too_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert len(str(Locations.find({}).socket)) <= MAX_SOCKET_PATH


def test_the_runtime_folder_is_ours_alone(tmp_path: Path) -> None:
    folder = private_directory(tmp_path / "a" / "run")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert stat.S_IMODE(private_directory(folder).stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").write_text("")
    for other in ("link", "file"):
        with pytest.raises(ConfigurationError):
            private_directory(tmp_path / other)
