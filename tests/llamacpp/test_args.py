"""A specification as the command line of each engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelrunner.errors import BadRequest
from modelrunner.types import Bundle, Endpoint, EngineDevice, Mode, RunSpec
from modelrunner_llamacpp import args, split
from modelrunner_llamacpp.engines import Engine, EngineKind
from tests.llamacpp.models import EAGLE, GEMMA3, GLM, JOINS, MINILM, SMOLLM2, bundle, header, spec

SOCKET = Endpoint(path=Path("/run/r1.sock"))
NATIVE = Engine(EngineKind.NATIVE, Path("/bin/llama-server"), "1")
WHEEL = Engine(EngineKind.WHEEL, Path("/engine/bin/python"), "1", devices=False)
PYTHON = Engine(EngineKind.PYTHON, Path("/usr/bin/python3"), "1")


def command(run: RunSpec, engine: Engine = NATIVE, endpoint: Endpoint = SOCKET, **settings: Any) -> list[str]:
    return args.command(engine, args.effective(run, **settings) | args.owned(run, endpoint, engine))


def values(words: list[str]) -> dict[str, str]:
    """Flag -> the word after it."""
    return dict(zip(words, [*words[1:], ""], strict=True))


def test_native_command_line() -> None:
    words = command(spec(bundle(SMOLLM2)))
    assert words[0] == "/bin/llama-server"
    found = values(words)
    assert found["--model"] == "/models/model.gguf"
    assert found["--alias"] == "docker.io/ai/model:latest"
    assert found["--host"] == "/run/r1.sock"
    assert (found["--ctx-size"], found["--parallel"], found["--cache-ram"]) == ("8192", "4", "0")
    assert {"--no-kv-unified", "--no-slots", "--no-webui", "--metrics", "--jinja", "--offline"} <= set(words)
    assert not {"--slots", "--props", "--threads", "--embeddings", "--port"} & set(words)


def test_tcp_endpoint_has_a_port() -> None:
    found = values(command(spec(bundle(SMOLLM2)), endpoint=Endpoint(host="127.0.0.1", port=4321)))
    assert (found["--host"], found["--port"]) == ("127.0.0.1", "4321")


def test_slots_are_saved_where_the_daemon_says() -> None:
    run = spec(bundle(SMOLLM2))
    options = args.effective(run) | args.owned(run, SOCKET, NATIVE, Path("/state/slots"))
    words = args.command(NATIVE, options)
    assert values(words)["--slot-save-path"] == "/state/slots/"
    assert ("--slots" in words, "--no-slots" in words) == (True, False)
    chosen = args.attributes(options)["attributes"]
    assert (chosen["slot_save_path"], chosen["endpoint_slots"]) == ("/state/slots/", True)


def test_a_persons_flags_win_over_the_specification() -> None:
    found = values(command(spec(bundle(SMOLLM2), "-c", "512", "-np", "1", "--cache-ram", "64"), cache_ram=8, threads=3))
    assert (found["--ctx-size"], found["--parallel"], found["--cache-ram"]) == ("512", "1", "64")
    assert values(command(spec(bundle(SMOLLM2), "-c", "512")))["--ctx-size"] == "2048"  # for each of four sequences
    assert found["--threads"] == "3"


def test_an_encoder_takes_its_whole_context_in_one_batch() -> None:
    found = values(command(spec(bundle(MINILM), mode=Mode.EMBEDDING, context=512)))
    assert "--embeddings" in found
    assert (found["--pooling"], found["--batch-size"], found["--ubatch-size"]) == ("mean", "512", "512")


def test_a_causal_embedder_pools_the_last_token_and_needs_no_wide_batch() -> None:
    found = values(command(spec(bundle(SMOLLM2), mode=Mode.EMBEDDING)))
    assert found["--pooling"] == "last"
    assert "--ubatch-size" not in found


def test_context_and_pooling_of_flags_decide_the_batch() -> None:
    found = values(command(spec(bundle(SMOLLM2), "--pooling", "mean", "-c", "1024", mode=Mode.EMBEDDING)))
    assert (found["--pooling"], found["--ubatch-size"]) == ("mean", "1024")


def test_reranking_pools_by_rank() -> None:
    found = values(command(spec(bundle(MINILM), mode=Mode.RERANKING)))
    assert (found["--pooling"], found["--ubatch-size"]) == ("rank", "2048")


def test_projector_and_draft() -> None:
    draft = bundle(SMOLLM2, Path("/draft"))
    found = values(command(spec(bundle(SMOLLM2, mmproj=Path("/models/p.gguf")), draft=draft)))
    assert found["--mmproj"] == "/models/p.gguf"
    assert (found["--spec-draft-model"], found["--spec-type"]) == ("/draft/model.gguf", "draft-simple")


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ((0, 0, 0), {"--device": "none"}),
        ((0, 31, 0), {"--device": "CUDA1"}),
        ((10, 0, 21), {"--device": "CUDA0,CUDA2", "--tensor-split": "10,21"}),
    ],
)
def test_a_run_names_the_devices_that_it_uses_and_no_other(
    placement: tuple[int, ...], expected: dict[str, str]
) -> None:
    layers = {"--n-gpu-layers": str(sum(placement))}
    flags = split.flags(placement)
    found = args.by_name(dict(zip(flags[::2], flags[1::2], strict=True)), listed("CUDA0", "CUDA1", "CUDA2"))
    assert found == layers | expected


def listed(*names: str) -> list[EngineDevice]:
    """Devices; those of RPC servers have "NAME@SERVER"."""
    parted = [name.partition("@") for name in names]
    return [EngineDevice(name, server or name, 100, 100, server) for name, _, server in parted]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ((31, 0, 0, 0), {"--device": "CUDA0"}),
        ((0, 0, 0, 31), {"--rpc": "b:1", "--device": "RPC0"}),
        ((0, 0, 31, 0), {"--rpc": "a:1", "--device": "RPC1"}),
        ((1, 0, 10, 20), {"--rpc": "a:1,b:1", "--device": "CUDA0,RPC1,RPC2", "--tensor-split": "1,10,20"}),
    ],
)
def test_a_run_names_the_servers_that_it_uses_and_no_other(
    placement: tuple[int, ...], expected: dict[str, str]
) -> None:
    """A server that is away ends an engine that names it. The engine numbers the devices of those that it gets."""
    flags = split.flags(placement)
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    found = args.by_name(options, listed("CUDA0", "RPC0@a:1", "RPC1@a:1", "RPC2@b:1"))
    assert found == {"--n-gpu-layers": "31"} | expected
    words = args.command(Engine(EngineKind.NATIVE, Path("llama-server"), "1"), found)
    assert "--rpc" not in words or words.index("--rpc") < words.index("--device")


@pytest.mark.parametrize("options", [{"--split-mode": "row", "--tensor-split": "1,1"}, {"--n-gpu-layers": "all"}])
def test_devices_that_llama_cpp_chooses_keep_their_numbers(options: dict[str, str]) -> None:
    assert args.by_name(options, listed("CUDA0", "CUDA1")) == options


def test_an_engine_without_devices_does_not_try_to_fit() -> None:
    cpu = Engine(EngineKind.NATIVE, Path("/bin/llama-server"), "1", devices=False)
    assert values(command(spec(bundle(SMOLLM2)), cpu))["--fit"] == "off"
    assert "--fit" not in command(spec(bundle(SMOLLM2)), NATIVE)


def test_the_wheel_gets_the_same_as_attributes() -> None:
    words = command(spec(bundle(SMOLLM2), "--temp", "0.5", "--no-kv-offload", "-fa", "on", "-ts", "3,1"), WHEEL)
    assert words[:2] == ["/engine/bin/python", "-I"]
    assert words[2].endswith("inside/modelrunner_serve.py")
    given = json.loads(words[4])
    found = given["attributes"]
    assert found["model.path"] == "/models/model.gguf"
    assert (found["n_ctx"], found["n_parallel"], found["kv_unified"], found["cache_ram_mib"]) == (8192, 4, False, 0)
    assert (found["endpoint_slots"], found["endpoint_props"], found["endpoint_metrics"]) == (False, False, True)
    assert (found["ui"], found["offline"], found["fit_params"]) == (False, True, False)
    assert (found["no_kv_offload"], found["flash_attn_type"]) == (True, "LLAMA_FLASH_ATTN_TYPE_ENABLED")
    assert (found["sampling.temp"], found["tensor_split"]) == (0.5, [3.0, 1.0])
    assert given["pinned"] == ["TEMP"]


def test_llama_cpp_python_gets_its_settings() -> None:
    given = json.loads(command(spec(bundle(SMOLLM2), "-ctk", "q8_0", parallel=1), PYTHON)[4])
    assert given["host"] == "/run/r1.sock"
    assert given["settings"]["model"] == "/models/model.gguf"
    assert (given["settings"]["n_ctx"], given["settings"]["type_k"]) == (2048, 8)


def test_llama_cpp_python_sees_and_does_not_hear() -> None:
    """Only by this name of a chat format does it open the projector, and it then wants one that sees."""
    model = bundle(SMOLLM2, mmproj=Path("/models/p.gguf"))
    for senses, projector, form in (({"vision", "audio"}, "/models/p.gguf", "mtmd"), ({"audio"}, None, None)):
        able = replace(model, capabilities=model.capabilities | senses)
        given = json.loads(command(spec(able), PYTHON)[4])["settings"]
        assert (given.get("clip_model_path"), given.get("chat_format")) == (projector, form)
        assert values(command(spec(able)))["--mmproj"] == "/models/p.gguf"


@pytest.mark.parametrize("flags", [("--swa-full",), ("--temp", "0.5")])
def test_llama_cpp_python_refuses_what_it_cannot_do(flags: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest, match=f"{flags[0]} needs llama.cpp's own server"):
        command(spec(bundle(SMOLLM2), *flags), PYTHON)


def test_a_stretched_context_is_told_to_the_engine_and_needs_its_flags() -> None:
    model = replace(bundle(SMOLLM2), context_length=2048)
    stretched = spec(model, "--rope-scaling", "yarn", "--rope-scale", "2", context=4096)
    found = values(command(stretched))
    assert (found["--override-kv"], found["--yarn-orig-ctx"]) == ("llama.context_length=int:4096", "2048")
    args.check(stretched, NATIVE.kind)
    with pytest.raises(BadRequest, match="install --build"):
        args.check(stretched, WHEEL.kind)
    with pytest.raises(BadRequest, match="--rope-scaling yarn --rope-scale 2"):
        args.check(spec(model, context=2049), NATIVE.kind)
    args.check(spec(model, context=2048), WHEEL.kind)
    assert "--override-kv" not in command(spec(model, context=2048))


def test_a_drafts_limits_are_flags_that_a_persons_own_win_over() -> None:
    drafted = spec(bundle(SMOLLM2), "--spec-draft-n-max", "9", draft=bundle(SMOLLM2, Path("/draft")))
    drafted = replace(drafted, draft_tokens=4, draft_acceptance=0.25)
    found = values(command(drafted))
    assert (found["--spec-draft-n-max"], found["--spec-draft-p-min"]) == ("9", "0.25")
    wheel = json.loads(command(drafted, WHEEL)[-1])["attributes"]
    assert (wheel["speculative.draft.n_max"], wheel["speculative.draft.p_min"]) == (9, 0.25)


def test_drafts_of_what_the_conversation_repeats() -> None:
    drafted = replace(spec(bundle(SMOLLM2)), ngram=True, draft_tokens=8)
    found = values(command(drafted))
    assert (found["--spec-type"], found["--spec-ngram-simple-size-m"]) == ("ngram-simple", "8")
    wheel = json.loads(command(drafted, WHEEL)[-1])["attributes"]
    assert wheel["speculative.types"] == ["COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE"]
    assert wheel["speculative.ngram_simple.size_m"] == 8
    with pytest.raises(BadRequest, match="no speculative decoding"):
        args.check(drafted, EngineKind.PYTHON)


def with_heads(metadata: dict[str, object], *more: str, folder: Path = Path("/models")) -> Bundle:
    return replace(bundle(metadata, folder), header=header(metadata, (*more, JOINS)))


def test_drafts_of_the_models_own_heads() -> None:
    run = replace(spec(with_heads(GLM, "blk.0.attn_norm.weight")), mtp=True, draft_tokens=2)
    args.check(run, NATIVE.kind)
    found = values(command(run))
    assert (found["--spec-type"], found["--spec-draft-n-max"]) == ("draft-mtp", "2")
    assert "--spec-draft-model" not in found
    wheel = json.loads(command(run, WHEEL)[-1])["attributes"]
    assert wheel["speculative.types"] == ["COMMON_SPECULATIVE_TYPE_DRAFT_MTP"]
    with pytest.raises(BadRequest, match="no speculative decoding"):
        args.check(run, PYTHON.kind)


def test_heads_that_the_file_or_the_engine_does_not_have_are_refused() -> None:
    named = {name: value for name, value in GLM.items() if "nextn" not in name}
    other = {name.replace("glm4moe", "exaone-moe"): value for name, value in GLM.items()}
    other["general.architecture"] = "exaone-moe"
    for model, why in (
        (bundle(GLM), "has no heads .* or its file leaves them out"),
        (with_heads(named), "has no heads"),
        (with_heads(other), "llama.cpp does not use the heads of exaone-moe models"),
    ):
        with pytest.raises(BadRequest, match=why):
            args.check(replace(spec(model), mtp=True), NATIVE.kind)


def test_a_head_that_was_trained_for_the_model_drafts_as_what_it_is() -> None:
    def type_of(draft: Bundle) -> str:
        found = values(command(spec(bundle(SMOLLM2), draft=draft)))
        assert found["--spec-draft-model"] == "/head/model.gguf"
        return found["--spec-type"]

    def head(width: int, layer: int = 30) -> Bundle:
        made_for = {"eagle3.target_hidden_size": width, "eagle3.target_layers": [2, 15, layer]}
        return bundle(EAGLE | made_for, Path("/head"))

    args.check(spec(bundle(SMOLLM2), draft=head(576)), NATIVE.kind)
    for other, reads in ((head(4096), "4096 figures of layer 30"), (head(576, 31), "576 figures of layer 31")):
        with pytest.raises(BadRequest, match=rf"{reads}; .* has 30 layers of 576"):
            args.check(spec(bundle(SMOLLM2), draft=other), NATIVE.kind)
    with pytest.raises(BadRequest, match="EAGLE head for gemma3 models"):
        args.check(spec(bundle(GEMMA3), draft=head(640)), NATIVE.kind)
    narrow = with_heads(GLM | {"glm4moe.embedding_length": 512}, folder=Path("/head"))
    with pytest.raises(BadRequest, match=r"its states have 512 figures, those of .* 1024"):
        args.check(spec(bundle(GLM), draft=narrow), NATIVE.kind)
    args.check(spec(bundle(GLM), draft=with_heads(GLM)), NATIVE.kind)
    assert type_of(head(576)) == "draft-eagle3"
    assert type_of(with_heads(GLM, folder=Path("/head"))) == "draft-mtp"
    assert type_of(with_heads(GLM, "blk.0.attn_norm.weight", folder=Path("/head"))) == "draft-simple"


@pytest.mark.parametrize(("context", "parallel"), [(512, 1), (2048, 4), (8192, 4), (1000, 3)])
def test_every_sequence_has_its_whole_context_in_both_engines(context: int, parallel: int) -> None:
    """The engine divides its context by the sequences, unless they share it."""
    run = spec(bundle(SMOLLM2), context=context, parallel=parallel)
    found = values(command(run))
    assert int(found["--ctx-size"]) // int(found["--parallel"]) == context
    assert "--no-kv-unified" in command(run)
    wheel = json.loads(command(run, WHEEL)[-1])["attributes"]
    assert (wheel["n_ctx"], wheel["n_parallel"], wheel["kv_unified"]) == (context * parallel, parallel, False)


def test_a_context_is_compared_with_the_trained_one_for_each_sequence() -> None:
    model = replace(bundle(SMOLLM2), context_length=32768)
    run = spec(model, context=32768, parallel=4)
    args.check(run, WHEEL.kind)
    assert values(command(run))["--ctx-size"] == str(4 * 32768)
    with pytest.raises(BadRequest, match="beyond the 32768 tokens"):
        args.check(spec(model, context=32769, parallel=4), NATIVE.kind)


@pytest.mark.parametrize("threads", [None, [2, 1]])
@pytest.mark.parametrize("engine", [NATIVE, WHEEL])
def test_each_flag_that_is_worth_measuring_is_one_of_the_engine(engine: Engine, threads: list[int] | None) -> None:
    plain = command(spec(bundle(SMOLLM2)), engine)
    tried = args.tunings(threads)
    for flags in tried:
        assert command(replace(spec(bundle(SMOLLM2)), flags=flags), engine) != plain, flags
        assert not {"--ctx-size", "--parallel", "--cache-type-k", "--cache-type-v"} & set(flags)
    assert [flags[1] for flags in tried if flags[0] == "--threads"] == [str(count) for count in threads or ()]
