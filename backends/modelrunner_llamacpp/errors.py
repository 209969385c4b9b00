"""Explains llama.cpp's log: its last words, and the stages of a start. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from modelrunner.sdk import BadRequest, ContextTooLong, ModelRunnerError
from modelrunner.sdk.diagnosis import Cause, Diagnosis

_LOCAL = "Its file is damaged or incomplete: remove the model and pull it again."
_NO_DEVICE_MEMORY = (
    r"cudaMalloc failed: out of memory|CUDA error: out of memory|ErrorOutOfDeviceMemory|hipErrorOutOfMemory|"
    r"kIOGPUCommandBufferCallbackErrorOutOfMemory|Insufficient Memory \("
)
_NO_MEMORY = (
    r"failed to allocate (?:compute )?(?:\S+ )?buffers?|unable to allocate|std::bad_alloc|Cannot allocate memory|"
    r"MemoryError|mmap failed|failed to mlock"
)
# Information and warnings end no engine: a failed mlock of an hour ago does not explain a crash now.
_IRRELEVANT = r"^(?:\d[\d.]* )?[DIW] "
# Specific causes come first, since every failed load ends with the same general lines.
_CAUSES = [
    Cause(r"unknown model architecture: '([^']*)'",
     "this llama.cpp does not know the model architecture {0!r}. This release of modelrunner installs one fixed "
     "version of the engine, so installing it again changes nothing: name a newer one in the configuration "
     "(`version` with `wheel_sha256`, or `llama_server`, in [backends.\"llama.cpp\"]; docs/configuration.md), or "
     "choose another model"),
    Cause(_NO_DEVICE_MEMORY,
     "the model does not fit in the GPU's memory: use a smaller context size, fewer GPU layers (--n-gpu-layers) or a "
     "smaller quantization", memory=True),
    Cause(_NO_MEMORY,
     "there is not enough memory for the model: use a smaller context size, or stop other models first", memory=True),
    Cause(r"RPC server version mismatch",
     "an RPC server speaks another version of the protocol than this llama.cpp: start the `ggml-rpc-server` of the "
     "same release there"),
    Cause(r"Failed to connect to (\S+:\d+)",
     "the RPC server {0} does not answer: start `ggml-rpc-server` there, or take it out of `rpc` in "
     "[backends.\"llama.cpp\"]"),
    Cause(r"Remote RPC server crashed",
     "an RPC server ended, or its connection did: start `ggml-rpc-server` there again"),
    Cause(r"quantized V cache (?:requires|was requested)",
     "a quantized cache for V (--cache-type-v) needs flash attention (--flash-attn on)"),
    Cause(r"(?:failed to load|could not load|unable to load) (?:CLIP|clip|multimodal|mmproj)|clip_init: .*failed",
     "the multimodal projector (mmproj) does not fit this model or is damaged: pull the model again"),
    Cause(r"missing tensor '([^']*)'", "the model lacks the tensor {0!r}. " + _LOCAL),
    Cause(r"tensor '[^']*' data is not within the file bounds|wrong number of tensors|tensor '[^']*' has wrong shape",
     "the model cannot be read. " + _LOCAL),
    Cause(r"failed to (?:load|apply) lora adapter '([^']*)'",
     "the LoRA adapter {0} cannot be loaded: its file was removed or changed after the model got it; name another with "
     "`modelrunner configure MODEL --lora PATH`, or take it back with `--lora default`"),
    Cause(r"chat template parsing error",
     "llama.cpp cannot use the model's chat template (`modelrunner show MODEL` says what is wrong with it): give it "
     "another one with `modelrunner configure MODEL --chat-template FILE`"),
    Cause(r"invalid magic characters|failed to read (?:magic|header|key-value pairs|tensor info)|GGUFv1 is no longer|"
     r"unsupported GGUF version|gguf_init_from_\w+: failed",
     "the model is not a GGUF file that llama.cpp can read. " + _LOCAL),
    Cause(r"error while loading shared libraries: (\S+?):|Library not loaded: (\S+)|"
     r"ImportError: (lib\S+): cannot open shared object",
     "the engine lacks the shared library {0}: install it, or install the engine again with "
     "`modelrunner install llama.cpp`"),
    Cause(r"ModuleNotFoundError: No module named '([^']*)'",
     "the engine's Python lacks the module {0!r}: install the engine again with `modelrunner install llama.cpp`"),
    Cause(r"CUDA driver version is insufficient|no CUDA-capable device|forward compatibility was attempted",
     "the GPU's driver does not suit this engine: update the driver, or install the engine for the CPU"),
    Cause(r"ggml_cuda_init: failed to initialize CUDA: (.{1,200})",
     "CUDA could not begin ({0}), so the engine computed on the processor: `modelrunner doctor` looks at the driver, "
     "and `modelrunner install llama.cpp --variant cpu` installs an engine without it"),
    Cause(r"couldn't bind HTTP server socket|[Aa]ddress already in use",
     "the engine could not listen on its socket: another process holds it, or its folder cannot be written; try again"),
    Cause(r"error: invalid argument: (\S+)|error while handling argument \"(\S+?)\"",
     "this llama-server does not take {0}: it is too old or too new for modelrunner; install one with "
     "`modelrunner install llama.cpp`"),
    Cause(r"failed to load model", "llama.cpp could not load the model. " + _LOCAL),
]  # fmt: skip
# The engine's words, with status 400 or 500, for an input beyond its context, or beyond the batch that an embedding has
# to fit in. The last ones are llama-cpp-python's (llama_cpp/server/errors.py).
_TOO_LONG = re.compile(
    r"(?<!\d)(?P<tokens>\d{1,18}) tokens\) (?:exceeds the available context size \("
    r"|is too large to process.{0,200}?batch size: |is larger than the max context size \()(?P<limit>\d+)"
    r"|maximum context length is (?P<context>\d{1,18}) tokens.{0,200}?\((?P<prompt>\d{1,18}) in ",
    re.DOTALL,
)
# The engine's words with status 500 where the request is at fault. llama-cpp-python's server has its own words for an
# image that is damaged or is not base64.
_CLIENTS_FAULT = re.compile(
    r"[Ff]ailed to (?:decode|load|process) (?:the )?(?:image|audio|video)|"
    r"Invalid base64 value|Failed to create bitmap|Incorrect padding|Invalid base64-encoded string|"
    r"json\.exception|Jinja|jinja|[Ff]ailed to parse (?:grammar|messages|tools|input)|roles must alternate|"
    r"context length|'loc': \('body'"  # the last is llama-cpp-python's server, about a field of another type
)
_UNSEEN = re.compile(r"(image|audio|video) input is not supported")
_UNPARSED = re.compile(r"[Ff]ailed to parse (grammar|messages|tools)\b")
# What the C++ library says where a number of the request is outside of a table of the model, such as a token.
_OUT_OF_RANGE = re.compile(r"\bvector::_M_|\bbasic_string::|out_of_range|length_error")
# What the C++ library says about a word in a form that should be a number.
_NO_NUMBER = re.compile(r"sto(?:f|ul)")
# No engine fetches files: its sandbox lets it connect nowhere (docs/sandbox.md).
_FETCHED = re.compile(r"cannot make GET request|HTTPS is not supported|Failed to download image")

_STAGES = [
    ("llama threadpool init", "warming up"),
    ("initializing, n_slots", "preparing slots"),
    ("loaded multimodal model", "loading projector"),
    ("loading draft model", "loading draft model"),
    ("load_model: loading model", "loading model"),
    ("llama_model_loader: loaded meta data", "loading model"),
    ("load_tensors:", "loading weights"),
    ("fitting params to device memory", "fitting to memory"),
    ("initializing ...", "starting"),
]


_DIAGNOSIS = Diagnosis(_CAUSES, _STAGES, irrelevant=_IRRELEVANT)
explain, ran_out_of_memory, stage = _DIAGNOSIS.explain, _DIAGNOSIS.ran_out_of_memory, _DIAGNOSIS.stage


def request_error(status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
    """Does as `ExplainsErrors.request_error` should, for llama.cpp."""
    if (match := _TOO_LONG.search(message)) or fields.get("type") == "exceed_context_size_error":
        said = {name: int(figure) for name, figure in match.groupdict().items() if figure} if match else {}
        tokens, limit = said.get("tokens", said.get("prompt")), said.get("limit", said.get("context"))
        return ContextTooLong(message, fields.get("n_prompt_tokens", tokens), fields.get("n_ctx", limit))
    if (match := _UNPARSED.search(message)) is not None:
        return BadRequest(message, param=match[1])
    if "response_format is supported for transcription" in message:
        return BadRequest(
            "llama.cpp writes down a sound as json, as text or as a stream: leave `response_format` out; srt, vtt and "
            "verbose_json come from a model of Whisper",
            param="response_format",
        )
    if _NO_NUMBER.fullmatch(message):
        return BadRequest("`temperature` and `max_tokens` of the form must be numbers")
    if status >= 500 and _FETCHED.search(message):
        return BadRequest("the engine fetches no files: send an image or a sound as a data: URL")
    if status >= 500 and _OUT_OF_RANGE.search(message):
        return BadRequest("a number in the request is out of range, such as a token that the model does not have")
    if status >= 500 and (match := _UNSEEN.search(message)) is not None:
        return BadRequest(f"{match[0]} by this model: `modelrunner list` shows what each model takes")
    return BadRequest(message) if status >= 500 and _CLIENTS_FAULT.search(message) else None
