"""LoRA adapters of models: finds a model's files that are adapters, and checks whether they fit the model.

Formats: GGUF as llama.cpp's convert_lora_to_gguf.py writes it (read by src/llama-adapter.cpp), and the folders of PEFT
(https://huggingface.co/docs/peft/developer_guides/checkpoint)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from modelrunner import boundedjson, lora
from modelrunner.errors import BadRequest, InvalidModel, ModelNotFound
from modelrunner.store import gguf, safetensors
from modelrunner.types import Adapter, Bundle, ModelFormat, ModelHeader, Tensor

_MAX_CONFIG = 1 << 20  # bytes
_MOST_SIGNS = 1 << 16
_PEFT_PREFIX = "base_model.model."
_EMBEDDING = "token_embd.weight"  # its two matrices are transposed
# The matrices of an adapter: A takes the inputs of the changed tensor, B gives its outputs. ggml counts the dimensions
# from the last one.
_GGUF_MATRICES = {".lora_a": 0, ".lora_b": 1}
_PEFT_MATRICES = {".lora_A.weight": 1, ".lora_B.weight": 0}
_OTHER = {lora.CONFIG: lora.WEIGHTS, lora.WEIGHTS: lora.CONFIG}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_CONVERT = "llama.cpp's convert_lora_to_gguf.py makes one of a PEFT folder"


def among(files: Mapping[str, Path]) -> tuple[Adapter, ...]:
    """Returns the adapters among the files of a model, in their order. Raises `OSError`."""
    adapters: dict[str, Adapter] = {}
    for file, path in files.items():
        if (named := lora.name_and_scale(file)) is not None:
            name, scale = named
            place = path.parent if "/" in file else path
            before = adapters.get(name, Adapter(name, place, scale, 0))
            adapters[name] = replace(before, size=before.size + path.stat().st_size)
    return tuple(adapters.values())


def applied(bundle: Bundle, texts: Sequence[str]) -> Bundle:
    """Returns the bundle with the adapters that its configuration names (`PATH[:SCALE]`) in place of its own. Reads
    their headers. Raises `ModelNotFound` for a missing file, `BadRequest` for one that is not an adapter of this
    model."""
    folder = bundle.format is ModelFormat.SAFETENSORS
    files: dict[str, Path] = {}
    for adapter in lora.parse(texts):
        require(adapter.path, folder=folder)
        files |= adapter.files(folder=folder)
    try:
        adapters = among(files)
        check(files, bundle.header)
    except InvalidModel as error:
        raise BadRequest(error.message.removeprefix("invalid model: "), param="lora") from None
    except OSError as error:
        raise BadRequest(f"a LoRA adapter cannot be read: {error}", param="lora") from None
    return replace(bundle, adapters=adapters)


def require(path: Path, *, folder: bool) -> None:
    """Raises `ModelNotFound` or `BadRequest` unless a file lies at `path` or, with `folder`, a PEFT folder."""
    if not path.exists():
        raise ModelNotFound(f"there is no LoRA adapter {path}", param="lora")
    if folder and not all((path / name).is_file() for name in (lora.CONFIG, lora.WEIGHTS)):
        raise BadRequest(
            f"{path} is not a LoRA adapter for a safetensors model: give a folder with {lora.CONFIG} and "
            f"{lora.WEIGHTS}",
            param="lora",
        )
    if not folder and not path.is_file():
        raise BadRequest(f"{path} is not a LoRA adapter for a GGUF model: give a GGUF file; {_CONVERT}", param="lora")


def check(files: Mapping[str, Path], model: ModelHeader) -> None:
    """Checks the adapters among the files of a model, which may lie anywhere. Raises `InvalidModel` for a file that is
    not a LoRA adapter, or for one of another model: of another architecture, for tensors that the model lacks, or for
    tensors of another shape."""
    for file, path in files.items():
        if (named := lora.name_and_scale(file)) is None:
            continue
        stem, is_peft, part = file.partition("/")
        if not is_peft:
            _check_gguf(named[0], path, model)
        elif (other := files.get(f"{stem}/{_OTHER[part]}")) is None:
            raise InvalidModel(f"the LoRA adapter {named[0]} lacks its file {_OTHER[part]}")
        elif part == lora.CONFIG:
            _check_peft(named[0], path, other, model)


def _check_gguf(name: str, path: Path, model: ModelHeader) -> None:
    header = gguf.read_header(path)
    kind = str(header.metadata.get("general.type", "model"))
    if kind != "adapter" or header.metadata.get("adapter.type") != "lora":
        raise InvalidModel(f"{name} is a GGUF file of the type {kind[:40]!r}, not a LoRA adapter; {_CONVERT}")
    if header.architecture != model.architecture:
        raise InvalidModel(
            f"the LoRA adapter {name} is for the architecture {header.architecture[:80]!r}, and the model is of"
            f" {model.architecture!r}"
        )
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    for base, dimension, length in _lengths(header.tensors, _GGUF_MATRICES):
        if base not in shapes:
            raise _foreign(name, f"changes {base}, which the model does not have")
        if base != _EMBEDDING and length != shapes[base][dimension]:
            raise _foreign(name, f"changes {length} values of {base} where the model has {shapes[base][dimension]}")


def _check_peft(name: str, place: Path, weights: Path, model: ModelHeader) -> None:
    config = boundedjson.read(place, _MAX_CONFIG, _MOST_SIGNS)
    kind, rank = (config.get("peft_type"), config.get("r")) if isinstance(config, dict) else (None, None)
    if kind != "LORA":
        raise InvalidModel(f"the adapter {name} is of the type {str(kind)[:40]!r}, not LORA ({lora.CONFIG})")
    if type(rank) is not int or rank < 1:
        raise InvalidModel(f"the LoRA adapter {name} has no rank: `r` of {lora.CONFIG} is {str(rank)[:40]}")
    # Packed weights have shapes of their own, and an engine may rename modules: other tensors are not compared.
    shapes = {tensor.name: tensor.shape for tensor in model.tensors if tensor.dtype in _FLOATS}
    tensors = safetensors.read_tensors(weights)
    for base, dimension, length in _lengths(tensors, _PEFT_MATRICES):
        shape = shapes.get(f"{base.removeprefix(_PEFT_PREFIX)}.weight", ())
        if len(shape) == 2 and length != shape[dimension]:
            raise _foreign(name, f"changes {length} values of {base} where the model has {shape[dimension]}")


def _lengths(tensors: Iterable[Tensor], matrices: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yields, for each matrix of an adapter, the name of the tensor that it changes, the dimension that both have in
    common, and the matrix's length in it. `matrices` has that dimension by the suffix of the matrix's name."""
    for tensor in tensors:
        for suffix, dimension in matrices.items():
            if tensor.name.endswith(suffix) and len(tensor.shape) >= 2:
                yield tensor.name.removesuffix(suffix), dimension, tensor.shape[dimension]


def _foreign(name: str, difference: str) -> InvalidModel:
    return InvalidModel(f"the LoRA adapter {name} was made for another model: it {difference}")
