"""What log lines mean. The stages, and the lines about Ray, quantization and memory on the CPU, were seen; the others
are written after the messages in vLLM's and its libraries' sources, and most of those starts were never made."""

import pytest

from modelrunner_vllm import errors


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ("ModuleNotFoundError: No module named 'xgrammar'", "incomplete (xgrammar)"),
        ("ModuleNotFoundError: No module named 'torchvision'", "take it as GGUF for llama.cpp"),
        ("RuntimeError: operator torchvision::nms does not exist", "incomplete (torchvision::nms)"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "GPU's memory"),
        (
            "ValueError: Free memory on device cuda:0 (3.1/23.5 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 21.2 GiB).",
            "in use by other programs",
        ),
        (
            "ValueError: Available memory on node 0 (1.2/23.0 GiB) on kv cache allocation is less than requested",
            "not enough memory",
        ),
        (
            "ValueError: To serve at least one request with the models's max seq len (8192), (0.18 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (0.05 GiB).",
            "cache is too small",
        ),
        (
            "ValueError: User-specified max_model_len (99999) is greater than the derived max_model_len "
            "(max_position_embeddings=8192)",
            "size 99999 is beyond",
        ),
        ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now.", "(FooForCausalLM)"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", "damaged"),
        (
            "ConnectionError: Could not find any running Ray instance. Please specify the one",
            "Ray cluster cannot be joined",
        ),
        (
            "ValueError: The number of required GPUs exceeds the total number of available GPUs in the group",
            "not enough free devices",
        ),
        ("ValueError: Total number of attention heads (9) must be divisible by tensor parallel size (2).", "heads"),
        ("api_server.py: error: unrecognized arguments: --swap-space", "does not take"),
        ("  Value error, Cannot find the config file for awq [type=value_error]", "not quantized with awq"),
        (
            "(Worker pid=3) ERROR 11-21 10:05:09 [multiproc_executor.py:953] RuntimeError: "
            "_C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4 argument(s).",
            "cannot run the model's quantization",
        ),
        (
            "(EngineCore pid=2) ERROR 11-21 10:05:09 [core.py:99] KeyError: 'lm_head.weight'",
            "could not start its engine: KeyError: 'lm_head.weight'",
        ),
        ("RuntimeError: Engine core initialization failed. See root cause above.", "its log says more"),
    ],
)
def test_last_words(tail: str, said: str) -> None:
    explained = errors.explain(f"(EngineCore pid=1) INFO ok\n{tail}\nRuntimeError: Engine core initialization failed.")
    assert explained is not None
    assert said in explained


def test_unknown_words_are_not_explained() -> None:
    assert errors.explain("INFO: Shutting down") is None


def test_what_is_tried_again_with_more_room() -> None:
    assert errors.ran_out_of_memory("torch.OutOfMemoryError: CUDA out of memory.")
    assert errors.ran_out_of_memory("ValueError: Available memory on node 0 (1/2 GiB) on startup is less than desired")
    assert errors.ran_out_of_memory("ValueError: No available memory for the cache blocks. Try increasing")
    assert not errors.ran_out_of_memory("ValueError: KV cache is needed, which is larger than the available KV cache")
    assert not errors.ran_out_of_memory("ModuleNotFoundError: No module named 'x'")


def test_stages_in_their_order() -> None:
    lines = (
        "importing vLLM",
        "(APIServer pid=1) INFO 11-21 [api_utils.py:286] non-default args: {'uds': '/x.sock'}",
        "(EngineCore pid=2) INFO 11-21 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/m'",
        "(Worker pid=3) INFO 11-21 [cpu_model_runner.py:68] Starting to load model /m...",
        "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:00,  1.06s/it]",
        "(Worker pid=3) INFO 11-21 [monitor.py:34] torch.compile takes 92.10 s in total",
        "(EngineCore pid=2) INFO 11-21 [kv_cache_utils.py:2327] CPU KV cache size: 12,928 tokens",
        "(EngineCore pid=2) INFO 11-21 [core.py:402] init engine (profile, create kv cache, warmup model) took 0.79 s",
        "(Worker pid=3) WARNING 11-21 [utils.py:333] something else",
    )
    assert [errors.stage(line) for line in lines] == [
        *("importing", "reading the configuration", "starting workers", "loading weights", "loading weights"),
        *("compiling", "warming up", "starting the server", None),
    ]


SETTINGS = (
    "(EngineCore pid=2) INFO 11-21 10:05:01 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='/m', tokenizer='/m', trust_remote_code=False, dtype=torch.bfloat16, max_seq_len=8192, quantization=None"
)
LOADING = "(Worker pid=3) INFO 11-21 10:05:09 [default_loader.py:404] Loading weights took 0.75 seconds"
WARNINGS = (
    "(APIServer pid=1) WARNING 11-21 10:05:00 [utils.py:9] MemoryError is raised where too little is free\n"
    "(EngineCore pid=2) INFO 11-21 10:05:02 [x.py:1] Unknown quantization method: none is used"
)


@pytest.mark.parametrize("tail", [SETTINGS, SETTINGS[60:], SETTINGS + "\n" + LOADING, WARNINGS, ""])
def test_an_engine_that_was_killed_is_not_explained_by_what_it_logged(tail: str) -> None:
    """Also where the end of the log begins in the middle of a line."""
    for end in ("", "\nFatal Python error: Segmentation fault", "\nKilled"):
        assert errors.explain(tail + end) is None
        assert not errors.ran_out_of_memory(tail + end)


def test_damaged_weights_of_a_model_without_code_are_what_they_are() -> None:
    error = "(EngineCore pid=2) ERROR 11-21 10:05:09 [core.py:99] safetensors_rust.SafetensorError: Error while reading"
    explained = errors.explain(f"{SETTINGS}\n{error}")
    assert explained is not None
    assert "damaged" in explained
    assert "trust" not in explained


@pytest.mark.parametrize(
    "error",
    [
        "ValueError: The repository /m contains custom code which must be executed to correctly load the model.",
        "RuntimeError: Failed to load the model config. If the model is a custom model, consider setting "
        "`trust_remote_code=True` in LLM or using the `--trust-remote-code` flag in the CLI.",
    ],
)
def test_a_model_that_needs_its_code_is_told_from_the_exception(error: str) -> None:
    explained = errors.explain(f"{SETTINGS}\nTraceback (most recent call last):\n{error}")
    assert explained is not None
    assert "the model needs code of its own" in explained


def test_the_source_in_a_traceback_is_no_cause() -> None:
    lines = (
        "(EngineCore pid=2) ERROR 11-21 10:05:09 [core.py:99] Traceback (most recent call last):",
        '(EngineCore pid=2) ERROR 11-21 10:05:09 [core.py:99]     raise ValueError("pass `trust_remote_code=True`")',
        "(EngineCore pid=2) ERROR 11-21 10:05:09 [core.py:99] KeyError: 'lm_head.weight'",
    )
    assert errors.explain("\n".join(lines)) == "vLLM could not start its engine: KeyError: 'lm_head.weight'"


@pytest.mark.parametrize(
    ("message", "figures"),
    [
        (
            "This model's maximum context length is 64 tokens. However, your prompt contains 70 input tokens, which "
            "exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
            (70, 64),
        ),
        (
            "This model's maximum context length is 64 tokens. However, your prompt contains at least 65 input tokens, "
            "which exceeds this limit even without any output tokens.",
            (65, 64),
        ),
        (
            "This model's maximum context length is 64 tokens. However, you requested 100 output tokens and your "
            "prompt contains 30 input tokens, for a total of 130 tokens.",
            (30, 64),
        ),
        (
            "This model's maximum context length is 64 tokens. However, your prompt contains 9000 characters (more "
            "than 640 characters, which is the upper bound for 64 input tokens).",
            (None, 64),
        ),
        ("The decoder prompt (length 70) is longer than the maximum model length of 64. Make sure", (70, 64)),
    ],
)
def test_an_overflow_has_its_figures(message: str, figures: tuple[int | None, int]) -> None:
    error = errors.request_error(400, message, {})
    assert error is not None
    assert (error.status, error.code, error.type) == (400, "context_length_exceeded", "exceed_context_size_error")
    assert (error.details["n_prompt_tokens"], error.details["n_ctx"]) == figures


@pytest.mark.parametrize(
    "message",
    [
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
        'tool_choice="required" requires --tool-call-parser to be set',
    ],
)
def test_a_missing_parser_is_named_as_a_setting(message: str) -> None:
    error = errors.request_error(400, message, {})
    assert error is not None
    assert (error.status, error.param) == (400, "tools")
    assert "`tool-call-parser`" in error.message
    assert "--tool-call-parser" not in error.message


def test_other_refusals_are_as_usual() -> None:
    assert errors.request_error(400, "temperature must be non-negative", {}) is None
    assert errors.request_error(500, "EngineCore encountered an issue", {}) is None
