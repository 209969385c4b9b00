"""LoRA adapters of the daemon's own folder, and a chat template that came with the model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from modelrunner.backend import BackendContext
from modelrunner.errors import BadRequest
from modelrunner.types import Endpoint
from modelrunner_llamacpp import LlamaCppBackend, args
from modelrunner_llamacpp.adapters import find_adapters
from modelrunner_llamacpp.engines import Engine, EngineKind
from tests.llamacpp.models import SMOLLM2, bundle, spec

ENGINES = {kind: Engine(kind, Path("/engine"), "1") for kind in (EngineKind.NATIVE, EngineKind.WHEEL)}
SOCKET = Endpoint(path=Path("/run/x.sock"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "style.gguf").write_bytes(b"GGUF" + bytes(1 << 20))
    (tmp_path / "text.gguf").write_text("something else")
    return tmp_path


@pytest.fixture
def backend(folder: Path) -> Callable[..., LlamaCppBackend]:
    return lambda **settings: LlamaCppBackend(BackendContext(folder, folder, folder, settings))


def test_they_are_found_by_name_in_that_folder_alone(folder: Path) -> None:
    assert find_adapters(folder, ["style"]) == (folder / "style.gguf",)
    for name, helps in (("other", "there is no LoRA adapter"), ("text", "convert_lora_to_gguf")):
        with pytest.raises(BadRequest, match=helps):
            find_adapters(folder, [name])
    with pytest.raises(BadRequest, match="need `adapters`"):
        find_adapters(None, ["style"])


async def test_they_are_judged_with_the_configuration_and_counted(
    folder: Path, backend: Callable[..., LlamaCppBackend]
) -> None:
    run = replace(spec(bundle(SMOLLM2)), options={"lora-adapters": ["style"]})
    with pytest.raises(BadRequest, match="need `adapters`"):
        backend().check(run)
    made = backend(adapters=str(folder))
    made.check(run)
    more = await made.required_memory(run)
    assert more.ram - (await made.required_memory(replace(run, options={}))).ram == 4 + (1 << 20)
    with pytest.raises(ValueError, match="String should match"):
        made.check(replace(run, options={"lora-adapters": ["../style"]}))


def test_both_engines_get_them_and_the_models_template() -> None:
    model = replace(bundle(SMOLLM2), files={"model.gguf": Path("/m.gguf"), "chat_template.jinja": Path("/t.jinja")})
    run = spec(model)
    options = args.effective(run) | args.owned(
        run, SOCKET, ENGINES[EngineKind.NATIVE], None, [Path("/a.gguf"), Path("/b")]
    )
    words = args.command(ENGINES[EngineKind.NATIVE], options)
    assert words[words.index("--lora") + 1] == "/a.gguf,/b"
    assert words[words.index("--chat-template-file") + 1] == "/t.jinja"
    wheel = json.loads(args.command(ENGINES[EngineKind.WHEEL], options)[-1])["attributes"]
    assert (wheel["lora_adapters"], wheel["chat_template_file"]) == (["/a.gguf", "/b"], "/t.jinja")
    named = spec(model, "--chat-template", "chatml")
    assert "--chat-template-file" not in args.owned(named, SOCKET, ENGINES[EngineKind.NATIVE])
