"""The command line and the environment of a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelrunner.errors import BadRequest
from modelrunner.types import Adapter, Bundle, Endpoint, Mode, RunSpec, Tensor
from modelrunner_vllm import args, environment
from modelrunner_vllm.engines import Engine, EngineKind
from modelrunner_vllm.environment import RunFiles, served_names
from tests.vllm.models import MINILM, SMOLLM2, bundle, spec

CPU = Engine(EngineKind.CPU, Path("/engine/bin/python"), "0.32.0")
CUDA = Engine(EngineKind.CUDA, Path("/engine/bin/python"), "0.32.0")
SOCKET = Endpoint(path=Path("/run/x.sock"))


def command(run: RunSpec, engine: Engine = CPU, **rest: Any) -> list[str]:
    given: dict[str, Any] = {"kv_cache": 1 << 28, "scratch": Path("/scratch")}
    return args.command(run, SOCKET, engine, **(given | rest))


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_names_the_socket_and_the_sizes() -> None:
    words = command(spec(context=4096, parallel=8))
    assert words[:4] == ["/engine/bin/python", "-P", "-m", "modelrunner_serve"]
    names = words.index("--served-model-name")
    assert words[names + 1 : names + 3] == ["docker.io/ai/smol:latest", "sha256:" + "a" * 64]
    found = {flag: value(words, flag) for flag in ("--uds", "--model", "--max-model-len", "--max-num-seqs")}
    assert found == {
        "--uds": "/run/x.sock",
        "--model": "/models/smol",
        "--max-model-len": "4096",
        "--max-num-seqs": "8",
    }
    assert value(words, "--kv-cache-memory-bytes") == str(1 << 28)
    assert value(words, "--middleware") == "modelrunner_guard.ModelGuard"
    assert value(words, "--load-format") == "safetensors"
    assert "--trust-remote-code" not in words


def test_compiled_on_a_gpu_only_unless_asked() -> None:
    assert "--enforce-eager" in command(spec())
    assert "--enforce-eager" not in command(spec(), CUDA)
    assert "--enforce-eager" not in command(spec(options={"enforce-eager": False}))
    assert "--enforce-eager" in command(spec(options={"enforce_eager": True}), CUDA)


@pytest.mark.parametrize(
    ("mode", "runner"), [(Mode.COMPLETION, "generate"), (Mode.EMBEDDING, "pooling"), (Mode.RERANKING, "pooling")]
)
def test_modes(mode: Mode, runner: str) -> None:
    words = command(spec(bundle(MINILM), mode=mode, options={"tool-call-parser": "hermes"}))
    assert value(words, "--runner") == runner
    assert ("--tool-call-parser" in words) == (mode is Mode.COMPLETION)


def test_the_share_of_a_device_is_the_runs_own_unless_somebody_said_one() -> None:
    assert "--gpu-memory-utilization" not in command(spec(), CUDA)
    assert value(command(spec(), CUDA, share=0.25), "--gpu-memory-utilization") == "0.25"
    chosen = spec(options={"gpu-memory-utilization": 0.5})
    assert value(command(chosen, CUDA, kv_cache=None, share=0.25), "--gpu-memory-utilization") == "0.5"


def test_devices_and_executor() -> None:
    assert "--distributed-executor-backend" not in command(spec())
    words = command(spec(options={"tensor-parallel-size": 4, "pipeline-parallel-size": 2}), CUDA)
    assert value(words, "--tensor-parallel-size") == "4"
    assert value(words, "--pipeline-parallel-size") == "2"
    assert value(words, "--distributed-executor-backend") == "mp"
    ray = spec(options={"tensor-parallel-size": 2, "executor": "ray", "ray-address": "10.0.0.1:6379"})
    assert value(command(ray), "--distributed-executor-backend") == "ray"


def test_speculative_decoding() -> None:
    draft = bundle(folder=Path("/models/draft"))
    with_draft = json.loads(value(command(spec(draft=draft, draft_tokens=3)), "--speculative-config"))
    assert with_draft == {"method": "draft_model", "model": "/models/draft", "num_speculative_tokens": 3}
    from_prompt = json.loads(value(command(spec(ngram=True, draft_tokens=4)), "--speculative-config"))
    assert (from_prompt["method"], from_prompt["num_speculative_tokens"]) == ("ngram", 4)


@pytest.mark.parametrize(
    ("metadata", "method"),
    [
        ({"general.architecture": "LlamaForCausalLMEagle3"}, "eagle3"),
        ({"general.architecture": "EagleLlamaForCausalLM"}, "eagle"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({}, "draft_model"),
    ],
)
def test_a_head_that_was_trained_for_the_model_drafts_as_what_it_is(metadata: dict[str, str], method: str) -> None:
    found = json.loads(value(command(spec(draft=bundle(SMOLLM2 | metadata))), "--speculative-config"))
    assert (found["method"], found["num_speculative_tokens"]) == (method, 4)


@pytest.mark.parametrize(
    "metadata", [{"num_nextn_predict_layers": 2}, {"text_config.mtp_num_hidden_layers": 2}, {"num_mtp_modules": 2}]
)
def test_drafts_of_the_models_own_heads(metadata: dict[str, int]) -> None:
    run = spec(bundle(SMOLLM2 | metadata), mtp=True)
    args.check(run, EngineKind.CPU)
    assert json.loads(value(command(run), "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 2}
    more = command(replace(run, draft_tokens=5))
    assert json.loads(value(more, "--speculative-config"))["num_speculative_tokens"] == 5
    with pytest.raises(BadRequest, match="has no heads"):
        args.check(spec(mtp=True), EngineKind.CPU)
    seen = bundle(SMOLLM2, Tensor("mtp.fc.weight", (4, 4), "BF16", 32))
    args.check(spec(seen, mtp=True), EngineKind.CPU)


def test_weights_and_flags() -> None:
    options = {"dtype": "float32", "quantization": "awq", "hf-overrides": {"rope_theta": 1e6}}
    words = command(spec(None, "--seed", "3", "--load-format", "dummy", "--no-enable-prefix-caching", options=options))
    assert (value(words, "--dtype"), value(words, "--quantization")) == ("float32", "awq")
    assert json.loads(value(words, "--hf-overrides")) == {"rope_theta": 1e6}
    assert words.count("--load-format") == 1
    assert value(words, "--load-format") == "dummy"
    assert words[-1] == "--no-enable-prefix-caching"


def adapted(root: Path, **adapters: tuple[int, float]) -> Bundle:
    """A model with adapters of these ranks and scales, whose `lora_alpha` is 8."""
    for name, (rank, _) in adapters.items():
        (root / name).mkdir(parents=True)
        (root / name / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 8, "bias": "none"}))
        (root / name / "adapter_model.safetensors").write_bytes(b"x" * 100)
    return replace(bundle(), adapters=tuple(Adapter(n, root / n, scale, 100) for n, (_, scale) in adapters.items()))


def test_the_models_name_stands_for_its_first_adapter(tmp_path: Path) -> None:
    run = spec(adapted(tmp_path, sql=(12, 1.0), chat=(64, 1.0)))
    words = command(run)
    assert (value(words, "--max-loras"), value(words, "--max-lora-rank")) == ("2", "64")
    name = "docker.io/ai/smol:latest"
    at = words.index("--lora-modules")
    first, second = (json.loads(word) for word in words[at + 1 : at + 3])
    assert first == {"name": name, "path": str(tmp_path / "sql")}
    assert second == {"name": f"{name}+chat", "path": str(tmp_path / "chat")}
    assert value(words, "--served-model-name") not in served_names(run)
    env = environment.variables(run, CPU, Path("/cache/compiled"), RunFiles(Path("/tmp/scratch"), "mark"))
    assert json.loads(env["MODELRUNNER_GUARD"])["adapters"] == {"sql": name, "chat": f"{name}+chat"}


def test_an_adapters_scale_multiplies_its_alpha(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = command(spec(adapted(tmp_path, sql=(12, 0.5))), scratch=scratch)
    folder = Path(json.loads(value(words, "--lora-modules"))["path"])
    assert folder.parent == scratch
    assert json.loads((folder / "adapter_config.json").read_text()) == {"r": 12, "lora_alpha": 4.0, "bias": "none"}
    assert (folder / "adapter_model.safetensors").read_bytes() == b"x" * 100
    assert json.loads((tmp_path / "sql" / "adapter_config.json").read_text())["lora_alpha"] == 8


def test_adapters_that_vllm_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="rank 4096; vLLM takes at most 512"):
        args.check(spec(adapted(tmp_path, huge=(4096, 1.0))), EngineKind.CPU)
    model = adapted(tmp_path, small=(4, 1.0))
    with pytest.raises(BadRequest, match="completions only, not to embedding"):
        args.check(spec(model, mode=Mode.EMBEDDING), EngineKind.CPU)
    (tmp_path / "small" / "adapter_config.json").unlink()
    with pytest.raises(BadRequest, match="cannot be read"):
        args.check(spec(model), EngineKind.CPU)


def test_the_environment_is_offline_and_tells_the_guard() -> None:
    run = spec(options={"executor": "ray", "ray-address": "head:6379"}, environment={"X": "1"})
    env = environment.variables(run, CPU, Path("/cache/compiled"), RunFiles(Path("/tmp/scratch"), "mark"))
    assert json.loads(env["MODELRUNNER_GUARD"]) == {"models": list(served_names(run)), "adapters": {}}
    assert (env["HF_HUB_OFFLINE"], env["VLLM_NO_USAGE_STATS"], env["VLLM_PLUGINS"]) == ("1", "1", "")
    assert (env["RAY_ADDRESS"], env["TMPDIR"]) == ("head:6379", "/tmp/scratch")
    assert env["VLLM_CACHE_ROOT"].startswith("/cache/compiled/")
    assert "VLLM_SERVER_DEV_MODE" not in env
    assert env["X"] == "1"


def test_without_an_address_it_joins_the_cluster_of_the_machine() -> None:
    run, scratch = spec(options={"executor": "ray"}), RunFiles(Path("/tmp/scratch"), "mark")
    assert environment.variables(run, CUDA, Path("/cache/compiled"), scratch)["RAY_ADDRESS"] == "auto"
    assert "RAY_ADDRESS" not in environment.variables(spec(), CUDA, Path("/cache/compiled"), scratch)


def test_it_may_read_the_clusters_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, scratch = tmp_path / "token", RunFiles(Path("/tmp/scratch"), "mark")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    for options, may in (({"executor": "ray"}, True), ({}, False)):
        run = spec(options=options)
        assert (token in environment.permissions(run, CUDA, tmp_path, scratch).reads) is may
        assert ("RAY_AUTH_TOKEN_PATH" in environment.variables(run, CUDA, tmp_path, scratch)) is may


@pytest.mark.parametrize(("engine", "compiles_ahead"), [(CPU, "0"), (CUDA, None)])
def test_what_was_compiled_for_the_cpu_is_left_to_the_compilers_cache(
    engine: Engine, compiles_ahead: str | None
) -> None:
    env = environment.variables(spec(), engine, Path("/cache/compiled"), RunFiles(Path("/tmp/scratch"), "mark"))
    assert env.get("VLLM_USE_AOT_COMPILE") == compiles_ahead


@pytest.mark.parametrize("options", [{"sleep": 1}, {"gpu-memory-utilization": 0.5}])
def test_what_needs_a_gpu_is_refused_on_the_cpu(options: dict[str, object]) -> None:
    args.check(spec(options=options), EngineKind.CUDA)
    with pytest.raises(BadRequest, match=r"GPU|CUDA"):
        args.check(spec(options=options), EngineKind.CPU)


def test_code_of_a_model_runs_only_where_the_store_says_that_it_is_trusted() -> None:
    assert "--trust-remote-code" not in command(spec(bundle()))
    assert "--trust-remote-code" in command(spec(replace(bundle(), brings_code=True)))


def test_a_template_of_the_configuration(tmp_path: Path) -> None:
    run = spec()
    own = run.bundle.directory / "chat_template.jinja"
    for file, words in ((own, []), (tmp_path / "given.jinja", ["--chat-template", str(tmp_path / "given.jinja")])):
        files = {**run.bundle.files, "chat_template.jinja": file}
        made = command(replace(run, bundle=replace(run.bundle, files=files)))
        assert [word for word in made if word in ("--chat-template", str(file))] == words
