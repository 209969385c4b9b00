"""Last words of real failures, and the stages of a start. The logs are llama.cpp's own."""

import pytest

from modelrunner_llamacpp.errors import explain, ran_out_of_memory, request_error, stage

UNKNOWN = """\
0.00.009.431 E llama_model_load: error loading model: unknown model architecture: 'nonsense'
0.00.009.432 E llama_model_load_from_file_impl: failed to load model
0.00.009.434 E srv    load_model: failed to load model, '/m/odd.gguf'
error: Failed to init server, please check the input params.
"""
TORN = """\
0.00.006.971 E common_fit_params: encountered an error while trying to fit params to free device memory: failed to load
0.00.007.019 E gguf_init_from_reader: failed to read key-value pairs
0.00.007.054 E llama_model_load: error loading model: llama_model_loader: failed to load model from cut.gguf
0.00.007.132 E srv    load_model: failed to load model, 'cut.gguf'
"""
CUT = """\
E llama_model_load: error loading model: tensor 'blk.16.ffn_down.weight' data is not within the file bounds, model is \
corrupted or incomplete
E srv    load_model: failed to load model, '/m/cut.gguf'
"""
PROJECTOR = """\
0.03.800.478 E mtmd_init_from_file: error: Failed to load CLIP model from /m/mmproj.gguf

0.03.800.491 E srv    load_model: failed to load multimodal model, '/m/mmproj.gguf'
"""
TEMPLATE = """\
0.00.413.900 E srv          init: init: chat template parsing error: Expected identifier at row 1
error: Failed to init server, please check the input params.
"""
MEMORY = """\
0.00.207.872 E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache
0.00.207.912 E cmn  common_init_: failed to create context with model '/m/model.gguf'
0.00.208.360 E srv  llama_server: exiting due to model loading error
"""
CUDA = """\
E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory
E alloc_tensor_range: failed to allocate CUDA0 buffer of size 4294967296
E srv    load_model: failed to load model, '/m/model.gguf'
"""
METAL = "ggml_metal_graph_compute: error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)\n"
SOCKET = """\
0.00.002.443 E srv         start: couldn't bind HTTP server socket, hostname: /nowhere/x.sock, port: 0
0.00.004.191 E srv          init: exiting due to HTTP server error
"""
LOADER = """\
llama-server: error while loading shared libraries: libcudart.so.12: cannot open shared object file: No such file
"""
IMPORT = "ImportError: libvulkan.so.1: cannot open shared object file: No such file or directory\n"
MISSING = "E llama_model_load: error loading model: missing tensor 'output_norm.weight'\n"
ARGUMENT = "error: invalid argument: --load-mode\n"


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (UNKNOWN, ("architecture 'nonsense'", "choose another model")),
        (TORN, ("not a GGUF file", "pull it again")),
        (CUT, ("damaged or incomplete", "pull it again")),
        (MISSING, ("output_norm.weight", "pull it again")),
        (PROJECTOR, ("mmproj", "pull the model again")),
        (MEMORY, ("not enough memory", "smaller context")),
        (CUDA, ("GPU's memory", "--n-gpu-layers")),
        (METAL, ("GPU's memory",)),
        ("E llama_init_from_model: quantized V cache requires flash_attn to be enabled\n", ("--flash-attn on",)),
        (SOCKET, ("listen on its socket",)),
        (LOADER, ("libcudart.so.12", "install")),
        (IMPORT, ("libvulkan.so.1", "install")),
        (ARGUMENT, ("--load-mode", "too old")),
        (TEMPLATE, ("chat template", "`modelrunner configure MODEL --chat-template FILE`")),
        ("E srv    load_model: failed to load model, 'x'\n", ("could not load the model",)),
    ],
)
def test_explains(tail: str, words: tuple[str, ...]) -> None:
    sentence = explain("0.00.008.037 I srv          init: initializing ...\n" + tail)
    assert sentence is not None
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(("tail", "starved"), [(MEMORY, True), (CUDA, True), (METAL, True), (TORN, False), ("", False)])
def test_memory_that_ran_out_is_told_apart(tail: str, starved: bool) -> None:
    assert ran_out_of_memory(tail) is starved


@pytest.mark.parametrize("tail", ["", "0.00.413.910 I srv          init: model loaded\n", "Killed\n", "{0} {x!r}\n"])
def test_nothing_known(tail: str) -> None:
    assert explain(tail) is None


@pytest.mark.parametrize(
    ("message", "fields", "figures"),
    [
        (
            "input (920 tokens) is too large to process. increase the physical batch size (current batch size: 64)",
            {},
            (920, 64),
        ),
        ("request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it", {}, (9000, 8192)),
        (
            "This model's maximum context length is 8192 tokens. However, you requested 9031 tokens (9030 in the "
            "messages, 1 in the completion). Please reduce the length of the messages or completion.",
            {"code": "context_length_exceeded"},
            (9030, 8192),
        ),
        ("too long", {"type": "exceed_context_size_error", "n_prompt_tokens": 5, "n_ctx": 4}, (5, 4)),
        ("too long", {"type": "exceed_context_size_error"}, (None, None)),
    ],
)
@pytest.mark.parametrize("status", [400, 500])
def test_an_overflow_has_its_figures(
    status: int, message: str, fields: dict[str, object], figures: tuple[int | None, int | None]
) -> None:
    error = request_error(status, message, fields)
    assert error is not None
    assert (error.status, error.code, error.type) == (400, "context_length_exceeded", "exceed_context_size_error")
    assert (error.details["n_prompt_tokens"], error.details["n_ctx"]) == figures
    assert "`modelrunner configure MODEL --context-size " in error.message


@pytest.mark.parametrize(("tokens", "size"), [(20268, 25600), (8193, 11264), (1, 1024)])
def test_an_overflow_names_the_command_that_makes_room(tokens: int, size: int) -> None:
    error = request_error(400, "too long", {"type": "exceed_context_size_error", "n_prompt_tokens": tokens})
    assert error is not None
    assert f"too long; `modelrunner configure MODEL --context-size {size} --restart` makes room" in error.message


@pytest.mark.parametrize(
    ("status", "message", "blamed"),
    [
        (500, "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj", True),
        (400, "image input is not supported", False),  # it is passed on as the client's anyhow
        (500, "Failed to load image or audio file", True),
        (500, "Invalid base64 value", True),
        (500, "error: cannot make GET request", True),
        (500, "HTTPS is not supported. Please rebuild with one of:\n  -DLLAMA_BUILD_BORINGSSL=ON", True),
        (500, "Failed to create bitmap from image bytes", True),
        (500, "failed to load model", False),
        (500, "Compute error.", False),
    ],
)
def test_whom_a_refusal_blames(status: int, message: str, blamed: bool) -> None:
    error = request_error(status, message, {})
    assert (error is not None and error.status == 400) is blamed


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("field", ["grammar", "messages", "tools"])
def test_what_cannot_be_parsed_is_named(status: int, field: str) -> None:
    error = request_error(status, f"Failed to parse {field}: Missing tool type: {{}}", {})
    assert error is not None
    assert (error.status, error.param) == (400, field)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("0.00.001.004 I srv  llama_server: initializing ...", "starting"),
        ("0.00.008.037 I srv          init: initializing ...", "starting"),
        ("0.00.016.100 I srv    load_model: loading model '/m/model.gguf'", "loading model"),
        ("0.00.346.129 I cmn          init: llama threadpool init, n_threads = 2", "warming up"),
        ("0.00.412.333 I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 2048", "preparing slots"),
        ("load_tensors: loading model tensors, this can take a while... (mmap = true)", "loading weights"),
        ("0.50.338.795 I slot      release: id  2 | task 2 | stop processing", None),
        ("", None),
    ],
)
def test_stages_of_a_start(line: str, name: str | None) -> None:
    assert stage(line) == name


@pytest.mark.parametrize(
    "line",
    [
        "0.00.100.000 W llama_mlock: warning: failed to mlock 98362432-byte buffer: Cannot allocate memory",
        "0.00.100.000 I srv    load_model: failed to load model is what this would say",
        "W load: mmap failed, reading the file instead",
    ],
)
def test_a_warning_of_an_engine_that_served_for_hours_explains_no_crash(line: str) -> None:
    tail = line + "\n0.50.338.795 I slot      release: id  2 | task 2 | stop processing\n"
    assert explain(tail) is None
    assert not ran_out_of_memory(tail)


def test_an_unknown_architecture_advises_nothing_that_changes_nothing() -> None:
    """The engine that a release installs is pinned: to install it once more gives the same."""
    sentence = explain(UNKNOWN)
    assert sentence is not None
    assert "`modelrunner install" not in sentence
    assert "`version` with `wheel_sha256`" in sentence


@pytest.mark.parametrize(
    "message",
    [
        "vector::_M_range_check: __n (which is 99999999) >= this->size() (which is 49152)",
        "vector::_M_default_append",
    ],
)
def test_a_number_out_of_range_is_the_clients_mistake(message: str) -> None:
    error = request_error(500, message, {})
    assert error is not None
    assert (error.status, "out of range" in error.message) == (400, True)
