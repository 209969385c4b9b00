"""Quantization by the tools of llama.cpp's engines."""

from dataclasses import replace
from pathlib import Path

import pytest

from modelrunner.errors import BackendExited, BackendUnavailable, BadRequest
from modelrunner.sdk import InstallProgress
from modelrunner.store import gguf
from modelrunner.store.describe import main_type
from modelrunner.types import Bundle, ProcessOptions, QuantizeSpec
from modelrunner_llamacpp import LlamaCppBackend
from modelrunner_llamacpp.engines import Engine, EngineKind
from modelrunner_llamacpp.quantize import TensorCounter, command


@pytest.fixture
def work(smollm2: Bundle, tmp_path: Path) -> QuantizeSpec:
    (tmp_path / "made").mkdir()
    return QuantizeSpec(smollm2, tmp_path / "made/model.gguf", "Q8_0", ProcessOptions(tmp_path / "log"))


def test_the_log_tells_how_far_it_is() -> None:
    steps: list[InstallProgress] = []
    counter = TensorCounter(steps.append)
    counter.output("llama_model_quantize_impl: n_layer_attn = 30")
    counter.output("[   3/ 272]   blk.0.attn_k.weight - [ 576, 192, 1, 1], type =    f16, converting to q4_K ..")
    assert steps == [InstallProgress("blk.0.attn_k.weight", 3, 272)]


@pytest.mark.engine
def test_only_what_the_engine_brings_is_run(work: QuantizeSpec, tmp_path: Path) -> None:
    native = Engine(EngineKind.NATIVE, tmp_path / "llama-server", "b1")
    with pytest.raises(BackendUnavailable, match="--build"):
        command(native, work, None)
    with pytest.raises(BackendUnavailable, match="--build"):
        command(Engine(EngineKind.WHEEL, tmp_path / "python", "b1"), work, None)
    tool = tmp_path / "llama-quantize"
    tool.touch(mode=0o700)
    model, target = str(work.bundle.model_file), str(work.target)
    assert command(native, work, 3) == [str(tool), "--allow-requantize", model, target, "Q8_0", "3"]


@pytest.mark.engine
async def test_smollm2_in_another_type(real_backend: LlamaCppBackend, work: QuantizeSpec, tmp_path: Path) -> None:
    steps: list[InstallProgress] = []
    try:
        await real_backend.quantize(work, steps.append)
    except BackendUnavailable as error:
        pytest.skip(error.message)
    header = gguf.read_header(work.target)
    assert main_type(header.tensors) == "Q8_0"
    assert header.architecture == work.bundle.header.architecture
    assert steps[-1].current == steps[-1].total == len(header.tensors)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(work.bundle.model_file.read_bytes()[:100_000])
    with pytest.raises(BadRequest):
        await real_backend.quantize(QuantizeSpec(work.bundle, work.target, "Q9", work.process), steps.append)
    hurt = QuantizeSpec(_opening(work.bundle, broken), tmp_path / "made/other.gguf", "Q4_0", work.process)
    with pytest.raises(BackendExited):
        await real_backend.quantize(hurt, steps.append)


def _opening(bundle: Bundle, file: Path) -> Bundle:
    return replace(bundle, files={"model.gguf": file})
