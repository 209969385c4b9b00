"""LoRA adapters and a chat template of a model, on the command line of llama.cpp."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from modelrunner.backend import BackendContext
from modelrunner.errors import BadRequest
from modelrunner.types import Adapter, Bundle, Endpoint
from modelrunner_llamacpp import LlamaCppBackend, args, memory
from modelrunner_llamacpp.engines import Engine, EngineKind
from tests.llamacpp.models import SMOLLM2, bundle, spec

ENGINES = {kind: Engine(kind, Path("/engine"), "1") for kind in (EngineKind.NATIVE, EngineKind.WHEEL)}
SOCKET = Endpoint(path=Path("/run/x.sock"))
SIZE = 5 << 20


def adapted(*paths: str) -> Bundle:
    adapters = (Adapter("any", Path(path), 0.5**n, SIZE) for n, path in enumerate(paths))
    return replace(bundle(SMOLLM2), adapters=tuple(adapters))


async def test_they_are_counted(tmp_path: Path) -> None:
    backend = LlamaCppBackend(BackendContext(tmp_path, tmp_path, tmp_path, {}))
    alone, both = [await backend.required_memory(spec(model)) for model in (adapted(), adapted("/a", "/b"))]
    assert both.ram - alone.ram == 2 * SIZE
    assert both.shared == alone.shared
    given = {"--n-gpu-layers": "31", "--split-mode": "none", "--main-gpu": "0"}
    on_device = [
        memory.required(spec(m), EngineKind.WHEEL, args.effective(spec(m)) | given) for m in (adapted(), adapted("/a"))
    ]
    assert on_device[1].vram[0] - on_device[0].vram[0] == SIZE


@pytest.mark.parametrize("sign", [",", ":", '"'])
async def test_a_path_that_llama_cpp_would_cut_is_refused(tmp_path: Path, sign: str) -> None:
    backend = LlamaCppBackend(BackendContext(tmp_path, tmp_path, tmp_path, {}))
    backend.check(spec(adapted("/a.gguf")))
    with pytest.raises(BadRequest, match="rename"):
        backend.check(spec(adapted(f"/a{sign}b.gguf")))


def test_both_engines_get_them_and_the_models_template() -> None:
    files = {"model.gguf": Path("/m.gguf"), "chat_template.jinja": Path("/t.jinja")}
    model = replace(adapted("/a.gguf", "/b"), files=files)
    run = spec(model)
    options = args.effective(run) | args.owned(run, SOCKET, ENGINES[EngineKind.NATIVE])
    words = args.command(ENGINES[EngineKind.NATIVE], options)
    assert words[words.index("--lora-scaled") + 1] == "/a.gguf:1,/b:0.5"
    assert words[words.index("--chat-template-file") + 1] == "/t.jinja"
    wheel = json.loads(args.command(ENGINES[EngineKind.WHEEL], options)[-1])["attributes"]
    assert (wheel["lora_adapters"], wheel["chat_template_file"]) == ([["/a.gguf", 1.0], ["/b", 0.5]], "/t.jinja")
    named = spec(model, "--chat-template", "chatml")
    assert "--chat-template-file" not in args.owned(named, SOCKET, ENGINES[EngineKind.NATIVE])
