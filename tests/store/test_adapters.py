"""LoRA adapters among the files of a model: packaged, published, and of another model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelrunner.errors import BadRequest, InvalidModel, ModelNotFound
from modelrunner.models.orders import parse_extras
from modelrunner.pull import Puller
from modelrunner.pull.file import LocalFiles
from modelrunner.store import Store, adapters
from modelrunner.store.mediatypes import GGUF_TYPE, LORA_TYPE
from tests.models import lora, safetensors
from tests.store.folders import model_files, write
from tests.store.samples import write_gguf
from tests.store.test_published import LICENSE, publish

WIDTH = 32
TENSOR = "blk.0.attn_q.weight"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", tensors={TENSOR: np.zeros((WIDTH, WIDTH), np.float32)})


async def package(store: Store, source: Path, *loras: str) -> None:
    await Puller(store).pull(LocalFiles(source, parse_extras(loras=loras)), lambda _: None, name="mine")


def shown(store: Store) -> list[tuple[str, float, bytes]]:
    return [(each.name, each.scale, each.path.read_bytes()) for each in store.bundle("mine").adapters]


async def test_a_gguf_model_has_them_in_the_order_of_their_names(store: Store, model: Path, tmp_path: Path) -> None:
    second = lora.write_gguf(tmp_path / "the second (v2).gguf", WIDTH)
    first = lora.write_gguf(tmp_path / "first.gguf", WIDTH)
    await package(store, model, f"{second.as_uri()}:-0.25", first.as_uri())
    expected = [("first", 1.0, first.read_bytes()), ("the-second-v2", -0.25, second.read_bytes())]
    bundle = store.bundle("mine")
    assert list(bundle.files) == ["model.gguf", "lora-first.gguf", "lora-the-second-v2@-0.25.gguf"]
    assert [tensor.name for tensor in bundle.header.tensors] == [TENSOR]
    assert [each.size for each in bundle.adapters] == [first.stat().st_size, second.stat().st_size]
    manifest = json.loads((store.data / "manifests/sha256" / bundle.model_id[7:]).read_bytes())
    assert [layer["mediaType"] for layer in manifest["layers"]] == [GGUF_TYPE, LORA_TYPE, LORA_TYPE]
    for opened in (store, Store(store.data)):
        assert shown(opened) == expected


async def test_a_folder_has_them_in_folders(store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", model_files())
    adapter = peft(tmp_path / "style")
    await package(store, folder, f"{adapter.as_uri()}:0.5")
    bundle = store.bundle("mine")
    [found] = bundle.adapters
    assert (found.name, found.scale, found.path) == ("style", 0.5, bundle.directory / "lora-style@0.5")
    assert found.size == sum(file.stat().st_size for file in adapter.iterdir())
    assert {file.name: file.read_bytes() for file in found.path.iterdir()} == {
        file.name: file.read_bytes() for file in adapter.iterdir()
    }
    assert len(bundle.header.tensors) == len(safetensors.read(folder / "model.safetensors"))
    assert [each.name for each in Store(store.data).bundle("mine").adapters] == ["style"]


def test_a_published_model_has_them_with_and_without_names(store: Store, model: Path, tmp_path: Path) -> None:
    """The layer's media type is docker's (docker/model-spec)."""
    data = [lora.write_gguf(tmp_path / "x.gguf", WIDTH, tensor=TENSOR).read_bytes()]
    data.append(data[0].replace(b"lora_a", b"lora_A"))
    layers = [(GGUF_TYPE, model.read_bytes(), None), (LICENSE, b"free", None)]
    named = [(LORA_TYPE, data[0], None), (LORA_TYPE, data[1], "lora-style@2.gguf")]
    manifest, blobs = publish(store, layers + named)
    store.create(blobs, "mine", manifest=manifest)
    assert shown(store) == [("1", 1.0, data[0]), ("style", 2.0, data[1])]


def peft(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    tensors = {"base_model.model.other.lora_A.weight": np.zeros((2, 8)), "other.lora_B.weight": np.zeros((8, 2))}
    safetensors.write(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | config))
    return folder


async def test_what_is_no_adapter_of_the_model_is_refused(store: Store, model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", model_files())
    qwen = lora.write_gguf(tmp_path / "qwen.gguf", WIDTH, architecture="qwen2")
    faults: list[tuple[Path, Path, type[Exception], str]] = [
        (model, tmp_path / "none.gguf", ModelNotFound, "there is no LoRA adapter"),
        (model, peft(tmp_path / "peft"), BadRequest, "convert_lora_to_gguf"),
        (model, model, InvalidModel, "of the type 'model', not a LoRA adapter"),
        (model, qwen, InvalidModel, "for the architecture 'qwen2', and the model is of 'llama'"),
        (model, lora.write_gguf(tmp_path / "wide.gguf", 64), InvalidModel, "changes 64 values"),
        (folder, qwen, BadRequest, "a folder with adapter_config.json"),
        (folder, peft(tmp_path / "loha", peft_type="LOHA"), InvalidModel, "'LOHA', not LORA"),
        (folder, peft(tmp_path / "flat", r=None), InvalidModel, "no rank"),
    ]
    for source, adapter, error, told in faults:
        with pytest.raises(error, match=told):
            await package(store, source, adapter.as_uri())
    assert store.list() == []


async def test_a_peft_adapter_is_compared_with_the_weights(store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", model_files())
    weights = {"model.q.weight": np.zeros((4, 6)), "model.packed.weight": np.zeros((4, 6))}
    safetensors.write(folder / "model.safetensors", weights)
    adapter = peft(tmp_path / "style")
    for shape, told in (((2, 6), ""), ((2, 4), "changes 4 values of base_model.model.model.q where the model has 6")):
        safetensors.write(
            adapter / "adapter_model.safetensors", {"base_model.model.model.q.lora_A.weight": np.zeros(shape)}
        )
        if told:
            with pytest.raises(InvalidModel, match=told):
                await package(store, folder, adapter.as_uri())
        else:
            await package(store, folder, adapter.as_uri())


async def test_adapters_of_one_name_and_wrong_scales_are_refused(store: Store, model: Path, tmp_path: Path) -> None:
    one = lora.write_gguf(tmp_path / "one.gguf", WIDTH)
    (tmp_path / "b").mkdir()
    for given, told in (
        ([one.as_uri(), (tmp_path / "b" / "ONE.gguf").as_uri()], "two LoRA adapters have the name one"),
        ([f"{one.as_uri()}:1001"], "between -1000 and 1000"),
        ([f"file:///{n}.gguf" for n in range(17)], "at most 16"),
        (["hf.co/a/b"], "names no file"),
    ):
        with pytest.raises(BadRequest, match=told):
            await package(store, model, *given)


async def test_configured_adapters_stand_in_place_of_packaged_ones(store: Store, model: Path, tmp_path: Path) -> None:
    packaged, other = (lora.write_gguf(tmp_path / f"{name}.gguf", WIDTH) for name in ("packaged", "other"))
    await package(store, model, packaged.as_uri())
    bundle = store.bundle("mine")
    assert [(each.name, each.scale) for each in adapters.applied(bundle, [f"{other}:0.5"]).adapters] == [("other", 0.5)]
    assert adapters.applied(bundle, []).adapters == ()
    with pytest.raises(BadRequest, match="absolute paths"):
        adapters.applied(bundle, ["other.gguf"])
    with pytest.raises(ModelNotFound, match="there is no LoRA adapter"):
        adapters.applied(bundle, [str(tmp_path / "gone.gguf")])
    other.write_bytes(b"GGUF")
    with pytest.raises(BadRequest, match="not a GGUF file"):
        adapters.applied(bundle, [str(other)])
