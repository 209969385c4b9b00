"""A model in GGUF: the role of each of its files, and the values in their headers."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelrunner import lora
from modelrunner.errors import InvalidModel
from modelrunner.store import adapters, describe, gguf
from modelrunner.store.describe import TEMPLATES, Reading, integer
from modelrunner.store.ggml import FILE_TYPES
from modelrunner.store.names import PROJECTOR, TEMPLATE
from modelrunner.types import ModelFormat, ModelHeader, Tensor

# Encoders of llama.cpp (llama-arch.cpp): they have no language head, or are trained for embeddings only.
_ENCODERS = frozenset(
    {"bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3"}
)
_ENCODERS |= {"eurobert", "gemma-embedding", "llama-embed", "t5encoder"}
_POOLING_NONE, _POOLING_RANK = 0, 4  # enum llama_pooling_type
_MAX_SHARDS = 99_999
# Entries that are whole numbers, or lists of one for each layer, by their names without the architecture.
_COUNTS = frozenset(
    {"block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "expert_count"}
    | {"expert_used_count", "attention.head_count", "attention.head_count_kv", "attention.key_length"}
    | {"attention.value_length", "attention.sliding_window", "rope.dimension_count", "nextn_predict_layers"}
    | {"leading_dense_block_count", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.group_count"}
)
_LARGEST_COUNT = (1 << 32) - 1
# A projector's entries about itself (KEY_HAS_VISION_ENC, KEY_HAS_AUDIO_ENC of clip.cpp), kept beside the model's.
_SEES, _HEARS = "clip.has_vision_encoder", "clip.has_audio_encoder"


def read(paths: Mapping[str, Path]) -> Reading:
    """Reads the headers of the files. Raises `InvalidModel` if the files do not make a model."""
    loras = sorted(name for name in paths if lora.name_and_scale(name))
    headers = {name: gguf.read_header(path) for name, path in paths.items() if name not in (TEMPLATE, *loras)}
    files = _arrange(headers)
    tensors = tuple(tensor for place in files.values() for tensor in headers[place].tensors)
    header = ModelHeader(_metadata(files, headers), tensors)
    _check(header)
    weights = [t for name, place in files.items() if name != PROJECTOR for t in headers[place].tensors]
    if TEMPLATE in paths:
        header = _with_template(header, describe.read_template(TEMPLATE, paths[TEMPLATE]))
        files[TEMPLATE] = TEMPLATE
    adapters.check({name: paths[name] for name in loras}, header)
    files |= {name: name for name in loras}
    size = sum(paths[place].stat().st_size for place in files.values())
    return Reading(files, header, configuration(header, weights, size))


def configuration(header: ModelHeader, weights: Sequence[Tensor], size: int) -> dict[str, Any]:
    """Returns the configuration, as `describe.configuration` does."""
    return describe.configuration(
        ModelFormat.GGUF,
        header,
        weights=weights,
        quantization=FILE_TYPES.get(integer(header, "general.file_type", -1)) or describe.main_type(weights),
        size=size,
        context_length=context_length(header),
    )


def context_length(header: ModelHeader) -> int | None:
    """Returns the tokens that the model was trained for, None if its header does not say."""
    length = integer(header, f"{header.architecture}.context_length", 0)
    return length if length > 0 else None


def brings_code(paths: Mapping[str, Path]) -> bool:
    """Returns False: a GGUF file has no code that an engine runs, and sandboxing chat templates is the engine's
    task."""
    return False


def capabilities(header: ModelHeader, names: Collection[str]) -> frozenset[str]:
    """Returns the capabilities; `names` are those of the bundle's files."""
    pooling = integer(header, f"{header.architecture}.pooling_type", _POOLING_NONE)
    if pooling == _POOLING_RANK:
        return frozenset({"reranking"})
    if pooling != _POOLING_NONE or header.architecture in _ENCODERS:
        return frozenset({"embedding"})
    return (
        frozenset({"completion"})
        | describe.abilities(header)
        | (_senses(header) if PROJECTOR in names else frozenset())
    )


def _senses(header: ModelHeader) -> frozenset[str]:
    """Returns the inputs that its projector gives a model. An old projector declares none and reads images."""
    hears = header.metadata.get(_HEARS) is True
    sees = header.metadata.get(_SEES, not hears) is True
    return frozenset({"vision"} if sees else ()) | frozenset({"audio"} if hears else ())


def _arrange(headers: Mapping[str, ModelHeader]) -> dict[str, str]:
    """Returns the names in the bundle for the files of `headers`, keyed by them in the order of the bundle: the model
    or its shards, then the projector. A file's role follows from its header, not from its name. Raises
    `InvalidModel`."""
    projectors = [name for name, header in headers.items() if _is_projector(header)]
    if PROJECTOR in headers and PROJECTOR not in projectors:
        raise InvalidModel(
            f"the file given as its projector has the architecture {headers[PROJECTOR].architecture!r}, not clip"
        )
    weights = [name for name in headers if name not in projectors]
    if len(projectors) > 1:
        raise InvalidModel("it has more than one projector file (mmproj)")
    for name in weights:
        kind = str(headers[name].metadata.get("general.type", "model"))
        if kind != "model":
            raise InvalidModel(f"{name!r} is of the type {kind[:40]!r}, not a model")
    if not any(headers[name].tensors for name in weights):
        raise InvalidModel("there is no model file with tensors in it")
    named = _name_weights(weights, headers)
    return named | ({PROJECTOR: projectors[0]} if projectors else {})


def _metadata(files: Mapping[str, str], headers: Mapping[str, ModelHeader]) -> dict[str, Any]:
    """Returns the metadata of the model's first file, and the projector's entries about itself."""
    metadata = dict(headers[next(iter(files.values()))].metadata)
    if PROJECTOR in files:
        projector = headers[files[PROJECTOR]].metadata
        metadata |= {key: projector[key] for key in (_SEES, _HEARS) if key in projector}
    return metadata


def _with_template(header: ModelHeader, template: str) -> ModelHeader:
    """Returns the header with the template of a separate file, which replaces all of the model's own."""
    rest = {key: value for key, value in header.metadata.items() if not key.startswith(TEMPLATES)}
    return ModelHeader(rest | {TEMPLATES: template}, header.tensors)


def _check(header: ModelHeader) -> None:
    """Raises `InvalidModel` for impossible figures, before they are used in computations."""
    describe.check_architecture(header)
    describe.check_layers(header, f"{header.architecture}.block_count")
    for key, value in header.metadata.items():
        name = key.removeprefix(f"{header.architecture}.")
        if name in _COUNTS or key.endswith((".length", "_token_id")):
            _check_count(key, value)
        elif key.startswith(TEMPLATES) and isinstance(value, str):
            describe.check_template(key, len(value.encode()))
        if key.startswith(TEMPLATES) and key.endswith(".length"):
            describe.check_template(key, value)


def _check_count(key: str, value: object) -> None:
    entries = value if isinstance(value, list) else [value]
    if not all(type(entry) is int and -1 <= entry <= _LARGEST_COUNT for entry in entries):
        raise InvalidModel(f"its metadata entry {key[:80]!r} is not a whole number in the possible range")


def _is_projector(header: ModelHeader) -> bool:
    return header.architecture == "clip" or header.metadata.get("general.type") == "mmproj"


def _name_weights(weights: list[str], headers: Mapping[str, ModelHeader]) -> dict[str, str]:
    counts = {integer(headers[name], "split.count", 1) for name in weights}
    if counts <= {0, 1}:
        if len(weights) > 1:
            raise InvalidModel(f"it has {len(weights)} model files that are not shards of one model")
        return {"model.gguf": weights[0]}
    by_number = {integer(headers[name], "split.no", -1): name for name in weights}
    count = counts.pop()
    if counts or count != len(weights) or set(by_number) != set(range(count)) or count > _MAX_SHARDS:
        present = ", ".join(str(number + 1) for number in sorted(by_number))
        raise InvalidModel(f"it is split into {count} files, all of which are needed; these are here: {present}")
    # The engine finds the other shards by this pattern (llama.cpp's llama_split_path).
    return {f"model-{n + 1:05}-of-{count:05}.gguf": by_number[n] for n in range(count)}
