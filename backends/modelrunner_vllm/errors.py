"""Explains vLLM's log: its last words, and the stages of a start. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from modelrunner.sdk import BadRequest, ContextTooLong, ModelRunnerError
from modelrunner.sdk.diagnosis import Cause, Diagnosis

_AGAIN = "install the engine again with `modelrunner install vllm`"
# Only an error that vLLM reports explains its end. The figures and settings that it logs do not, nor do the lines of
# source code in a traceback.
_IRRELEVANT = (
    r"\b(?:DEBUG|INFO|WARNING) \d\d-\d\d |^\s*File \"|"
    r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\])?\s+(?:raise|return|self\.|\w+ = )"
)
# Specific causes come first: every failed start ends with the same general lines.
_CAUSES = [
    Cause(r"No module named 'torchvision'",
     "this model's images need torchvision, of which there is no build for processors: run it with vLLM's CUDA build, "
     "take it as GGUF for llama.cpp, or choose another model (SmolVLM and PaliGemma need none)"),
    Cause(r"No module named '([^']*)'|cannot import name '([^']*)'|operator (\S+) does not exist",
     "the engine's environment is incomplete ({0}): " + _AGAIN),
    Cause(r"error while loading shared libraries: (\S+?):|(lib\S+): cannot open shared object",
     "the engine lacks the shared library {0}: install it, or " + _AGAIN),
    Cause(r"CUDA driver version is insufficient|no CUDA-capable device|NVIDIA driver on your system is too old",
     "the GPU's driver does not suit this vLLM: update the driver"),
    Cause(r"Could not connect to (?:a )?Ray|ConnectionError: Could not find any running Ray instance|"
     r"Failed to connect to Ray|ray\S*: ?Connection refused|Ray client.*(?:timed out|unavailable)|"
     r"failed to connect to GCS|Failed to get cluster ID from GCS|Version mismatch: The cluster was started",
     "the Ray cluster cannot be joined: check `ray-address`, that the cluster runs (`ray status`), and that its Ray "
     "and Python have the versions of the engine's environment"),
    Cause(r"(?:The number of required (\S+) exceeds the total number of available|Cannot provide a placement group|"
     r"No available node types can fulfill|Current node has no (\S+) available|Ray does not allocate any GPUs)",
     "the Ray cluster has not enough free devices for tensor-parallel-size x pipeline-parallel-size: lower them, or "
     "free devices (`ray status` shows them)"),
    Cause(r"current platform (\S+) does not support ray",
     "vLLM's build for the {0} joins a Ray cluster, but runs nothing on it: executor ray needs the CUDA build"),
    Cause(r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|HIP out of memory",
     "the model does not fit in the GPU's memory: use a smaller context size, fewer parallel sequences, a quantized "
     "model, or more devices (tensor-parallel-size)", memory=True),
    Cause(r"Free memory on device .{0,80}is less than desired GPU memory utilization",
     "the GPU's memory is in use by other programs: free it, or lower gpu-memory-utilization", memory=True),
    Cause(r"Available memory on node .{0,200}is less than|Cannot allocate memory|DefaultCPUAllocator|"
     r"std::bad_alloc|MemoryError",
     "there is not enough memory for the model: use a smaller context size, or stop other models first", memory=True),
    Cause(r"larger than the available KV cache memory|KV cache is needed.{0,200}larger than the available",
     "the cache is too small for the context: lower the context size, or raise kv-cache-size"),
    Cause(r"No available memory for the cache blocks",  # other programs took it while vLLM measured
     "there was no memory left for the cache: use a smaller context size, or stop other models first", memory=True),
    Cause(r"max_model_len \((\d+)\) is greater than the derived max_model_len",
     "the context size {0} is beyond what the model was made for: lower it, or set hf-overrides (rope_parameters) if "
     "the model can be extended"),
    Cause(r"Model architectures \['([^']*)'\S* (?:are not supported|failed)|no vLLM implementation.{0,80}'([^']*)'|"
     r"Cannot find model module.{0,40}'([^']*)'|model type `([^`]*)` but Transformers does not recognize",
     "this vLLM does not know the model's architecture ({0}). This release of modelrunner installs one fixed version "
     "of vLLM, so installing it again changes nothing: choose another model, or try hf-overrides (docs/vllm.md)"),
    Cause(r"SafetensorError|Error while deserializing header|MetadataIncompleteBuffer",
     "a weights file is damaged or incomplete: remove the model and pull it again"),
    Cause(r"Cannot find any model weights|no safetensors (?:weights|files)",
     "the model has no safetensors weights that vLLM can load: pull it again"),
    Cause(r"Can't load (?:the )?(?:configuration|tokenizer)|does not appear to have a file named (\S+)|"
     r"Invalid repository ID",
     "the model lacks files that vLLM needs (config.json, tokenizer): pull it again"),
    Cause(r"Cannot find the config file for (\w+)",
     "the model's weights are not quantized with {0}: leave `quantization` out, its config.json says what they are"),
    Cause(r"`trust_remote_code=True`|custom code which must be executed|requires you to execute the configuration file",
     "the model needs code of its own, which is not run: choose another model, or, if you trust it with all that this "
     "account may do, take it again with --trust-remote-code"),
    Cause(r"Unknown quantization method|quantization method.{0,120}not supported|not supported for the current GPU|"
     r"_C::(\w+)\(\) expected at most 0 argument",  # this build has the kernel's name but not the kernel
     "this device or build cannot run the model's quantization: choose another quantization of the model"),
    Cause(r"must be divisible by tensor parallel size|divisible by tensor.parallel",
     "tensor-parallel-size does not divide the model's attention heads: choose another"),
    Cause(r"error: (?:unrecognized arguments|argument)[: ]+([^\n]{0,120})",
     "this vLLM does not take {0}: " + _AGAIN),
    Cause(r"\((?:Worker|EngineCore)[^)\n]*\) ERROR [^\]\n]*\] (\w+(?:Error|Exception): [^\n]{1,300})",
     "vLLM could not start its engine: {0}"),
    Cause(r"Engine core initialization failed", "vLLM could not start its engine; its log says more"),
]  # fmt: skip
# vLLM's words for an input beyond its context (vllm/renderers/params.py, vllm/v1/engine/input_processor.py).
_TOO_LONG = [re.compile(text) for text in (r"maximum context length is \d+", r"longer than the maximum\s+model length")]
_PROMPT_TOKENS = re.compile(r"prompt contains (?:at least )?(\d+) (?:input )?tokens|\(length (\d+)\)")
_LIMIT = re.compile(r"maximum context length is (\d+)|model length of (\d+)")

# vLLM's words for a file that it would have to fetch (vllm/multimodal/media/connector.py).
_FETCHED = re.compile(r"URL must be (?:from one of the allowed domains|either)|Cannot load local files")

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


_DIAGNOSIS = Diagnosis(_CAUSES, _STAGES, irrelevant=_IRRELEVANT)
explain, ran_out_of_memory, stage = _DIAGNOSIS.explain, _DIAGNOSIS.ran_out_of_memory, _DIAGNOSIS.stage


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return int(match[1] or match[2]) if match else None


def request_error(status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
    """Does as `ExplainsErrors.request_error` should, for vLLM."""
    if any(pattern.search(message) for pattern in _TOO_LONG):
        prompt, limit = (_number(pattern, message) for pattern in (_PROMPT_TOKENS, _LIMIT))
        return ContextTooLong(message, prompt, limit)
    if _FETCHED.search(message):
        return BadRequest("the engine fetches no files: send an image or a sound as a data: URL")
    if "--tool-call-parser" in message:
        return BadRequest(
            "this model's tool calls cannot be read, since no parser is set for them: name one with the setting "
            "`tool-call-parser` in the table `vllm` of the model's configuration",
            param="tools",
        )
    return None
