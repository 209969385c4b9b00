"""What vLLM's log lines mean to a person: last words, and the stages of a start. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from modelrunner import BadRequest, ContextTooLong, ModelRunnerError

_AGAIN = "install the engine again with `modelrunner install vllm`"
# The first that matches anywhere in the tail wins; a group of the match fills {0}. Specific causes come first: every
# failed start ends with the same general lines.
_CAUSES = [
    (r"No module named '([^']*)'|cannot import name '([^']*)'|operator (\S+) does not exist",
     "the engine's environment is incomplete ({0}): " + _AGAIN),
    (r"error while loading shared libraries: (\S+?):|(lib\S+): cannot open shared object",
     "the engine lacks the shared library {0}: install it, or " + _AGAIN),
    (r"CUDA driver version is insufficient|no CUDA-capable device|NVIDIA driver on your system is too old",
     "the GPU's driver does not suit this vLLM: update the driver"),
    (r"Could not connect to (?:a )?Ray|ConnectionError: Could not find any running Ray instance|"
     r"Failed to connect to Ray|ray\S*: ?Connection refused|Ray client.*(?:timed out|unavailable)|"
     r"failed to connect to GCS|Failed to get cluster ID from GCS|Version mismatch: The cluster was started",
     "the Ray cluster cannot be joined: check `ray-address`, that the cluster runs (`ray status`), and that its Ray "
     "and Python have the versions of the engine's environment"),
    (r"(?:The number of required (\S+) exceeds the total number of available|Cannot provide a placement group|"
     r"No available node types can fulfill|Current node has no (\S+) available|Ray does not allocate any GPUs)",
     "the Ray cluster has not enough free devices for tensor-parallel-size x pipeline-parallel-size: lower them, or "
     "free devices (`ray status` shows them)"),
    (r"current platform (\S+) does not support ray",
     "vLLM's build for the {0} joins a Ray cluster, but runs nothing on it: executor ray needs the CUDA build"),
    (r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|HIP out of memory",
     "the model does not fit in the GPU's memory: use a smaller context size, fewer parallel sequences, a quantized "
     "model, or more devices (tensor-parallel-size)"),
    (r"Free memory on device .{0,80}is less than desired GPU memory utilization",
     "the GPU's memory is in use by other programs: free it, or lower gpu-memory-utilization"),
    (r"Available memory on node .{0,200}is less than|Cannot allocate memory|DefaultCPUAllocator: (?:can't|not enough)|"
     r"std::bad_alloc|MemoryError",
     "there is not enough memory for the model: use a smaller context size, or stop other models first"),
    (r"larger than the available KV cache memory|KV cache is needed.{0,200}larger than the available|"
     r"No available memory for the cache blocks",
     "the cache is too small for the context: lower the context size, or raise kv-cache-size"),
    (r"max_model_len \((\d+)\) is greater than the derived max_model_len",
     "the context size {0} is beyond what the model was made for: lower it, or set hf-overrides (rope_parameters) if "
     "the model can be extended"),
    (r"Model architectures \['([^']*)'\S* (?:are not supported|failed)|no vLLM implementation.{0,80}'([^']*)'|"
     r"Cannot find model module.{0,40}'([^']*)'|model type `([^`]*)` but Transformers does not recognize",
     "this vLLM does not know the model's architecture ({0}): update the engine, or choose another model"),
    (r"trust_remote_code|requires you to execute the configuration file",
     "the model needs code of its own, which is not run: choose another model, or, if you trust it with all that this "
     "account may do, take it again with --trust-remote-code"),
    (r"SafetensorError|Error while deserializing header|MetadataIncompleteBuffer",
     "a weights file is damaged or incomplete: remove the model and pull it again"),
    (r"Cannot find any model weights|no safetensors (?:weights|files)",
     "the model has no safetensors weights that vLLM can load: pull it again"),
    (r"Can't load (?:the )?(?:configuration|tokenizer)|does not appear to have a file named (\S+)|"
     r"Invalid repository ID",
     "the model lacks files that vLLM needs (config.json, tokenizer): pull it again"),
    (r"Cannot find the config file for (\w+)",
     "the model's weights are not quantized with {0}: leave `quantization` out, its config.json says what they are"),
    (r"Unknown quantization method|quantization method.{0,120}not supported|not supported for the current GPU|"
     r"_C::(\w+)\(\) expected at most 0 argument",  # a kernel that this build has the name of, and nothing more
     "this device or build cannot run the model's quantization: choose another quantization of the model"),
    (r"must be divisible by tensor parallel size|divisible by tensor.parallel",
     "tensor-parallel-size does not divide the model's attention heads: choose another"),
    (r"error: (?:unrecognized arguments|argument)[: ]+([^\n]{0,120})",
     "this vLLM does not take {0}: " + _AGAIN),
    (r"\((?:Worker|EngineCore)[^)\n]*\) ERROR [^\]\n]*\] (\w+(?:Error|Exception): [^\n]{1,300})",
     "vLLM could not start its engine: {0}"),
    (r"Engine core initialization failed", "vLLM could not start its engine; its log says more"),
]  # fmt: skip
_STARVED = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|is less than desired GPU memory utilization|"
    r"Available memory on node .{0,200}is less than|Cannot allocate memory|DefaultCPUAllocator|std::bad_alloc|"
    r"MemoryError|No available memory for the cache blocks",  # the last where others took it while vLLM measured
    re.DOTALL,
)
# What vLLM says to an input beyond its context (vllm/renderers/params.py, vllm/v1/engine/input_processor.py).
_TOO_LONG = [re.compile(text) for text in (r"maximum context length is \d+", r"longer than the maximum\s+model length")]
_PROMPT_TOKENS = re.compile(r"prompt contains (?:at least )?(\d+) (?:input )?tokens|\(length (\d+)\)")
_LIMIT = re.compile(r"maximum context length is (\d+)|model length of (\d+)")
_COMPILED = [(re.compile(pattern, re.DOTALL), sentence) for pattern, sentence in _CAUSES]

_STAGES = [
    ("importing vLLM", "importing"),
    ("non-default args", "reading the configuration"),
    ("Initializing a V1 LLM engine", "starting workers"),
    ("Starting to load model", "loading weights"),
    ("Loading safetensors checkpoint shards", "loading weights"),
    ("Dynamo bytecode transform", "compiling"),
    ("Compiling a graph", "compiling"),
    ("torch.compile", "compiling"),
    ("Capturing CUDA graph", "capturing CUDA graphs"),
    ("Warming up model", "warming up"),
    ("warming up", "warming up"),
    ("KV cache size:", "warming up"),
    ("init engine (profile", "starting the server"),
]


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(found[1] or found[2]) if found else None


def explain(tail: str) -> str | None:
    """A sentence that says what happened and what to do, or None where the last words say nothing known."""
    for pattern, sentence in _COMPILED:
        if match := pattern.search(tail):
            return sentence.format(next((group for group in match.groups() if group), ""))
    return None


def request_error(status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
    """As `Backend.request_error`."""
    if any(pattern.search(message) for pattern in _TOO_LONG):
        prompt, limit = (_number(pattern, message) for pattern in (_PROMPT_TOKENS, _LIMIT))
        return ContextTooLong(message, prompt, limit)
    if "--tool-call-parser" in message:
        return BadRequest(
            "this model's tool calls cannot be read, since no parser is set for them: name one with the setting "
            "`tool-call-parser` in the table `vllm` of the model's configuration",
            param="tools",
        )
    return None


def ran_out_of_memory(tail: str) -> bool:
    return _STARVED.search(tail) is not None


def stage(line: str) -> str | None:
    """The stage of starting that a log line announces."""
    return next((name for text, name in _STAGES if text in line), None)
