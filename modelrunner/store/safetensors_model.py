"""A model in safetensors: a folder as Hugging Face's libraries write it, with config.json, tokenizer and weights.

Its description is the content of config.json. None of its code is run: a configuration that names code (`auto_map`)
requires its owner's trust, see `require_no_code`."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from modelrunner import boundedjson, lora
from modelrunner.boundedjson import read_object
from modelrunner.errors import InvalidModel, UnsupportedModel
from modelrunner.store import adapters, describe, foreignformats, safetensors
from modelrunner.store.describe import TEMPLATES, Reading, integer
from modelrunner.store.names import CONFIG, INDEX, WEIGHTS, in_folder, is_code
from modelrunner.types import ModelFormat, ModelHeader, Tensor

_MAX_CONFIG = 4 << 20  # bytes; the largest ones list the names of some ten thousand classes
_MAX_INDEX = 32 << 20
_MAX_KEPT = 8 << 20  # bytes of all names and values that are kept
_ENTRY_SIZE = 32  # bytes that an entry of a list takes in Python
_LONGEST_KEPT_ARRAY = 4096  # entries; ModelHeader says how longer ones appear
_LONGEST_KEPT_STRING = 1 << 16
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_LONGEST_CONTEXT = 1 << 32  # tokens; a larger value means "any"
_TEMPLATE_HOLDERS = ("tokenizer_config.json", "chat_template.json")
_MOST_TEMPLATES = 32
_PROCESSOR, _IMAGES, _SOUNDS = "preprocessor_config.json", "image_processor_type", "feature_extractor_type"
# The tasks of transformers' classes, by the ends of their names.
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForVision2Seq", "ForImageTextToText")
_ENCODES = ("Model", "ForMaskedLM", "ForPreTraining", "ForTextEncoding")
_RANKS = "ForSequenceClassification"
# Metadata keys of models that take images or sound.
_SENSES = {
    "vision": ("vision_config.", f"{_PROCESSOR}.{_IMAGES}"),
    "audio": ("audio_config.", f"{_PROCESSOR}.{_SOUNDS}"),
}


def read(paths: Mapping[str, Path]) -> Reading:
    """Reads the files. Raises `InvalidModel` if they do not make a model."""
    _check_names(paths)
    metadata = _flattened(read_object(paths[CONFIG], _MAX_CONFIG)) | _processor(paths) | _templates(paths)
    header = ModelHeader(metadata | {"general.architecture": _architecture(metadata)}, _tensors(paths))
    _check(header)
    adapters.check({name: paths[name] for name in sorted(paths)}, header)
    weights = header.tensors
    config = describe.configuration(
        ModelFormat.SAFETENSORS,
        header,
        weights=weights,
        quantization=str(metadata.get("quantization_config.quant_method") or describe.main_type(weights))[:40].upper(),
        size=sum(path.stat().st_size for path in paths.values()),
        context_length=context_length(header),
    )
    names = [CONFIG, *sorted(name for name in paths if name != CONFIG)]
    return Reading({name: name for name in names}, header, config)


def _check(header: ModelHeader) -> None:
    """Raises `InvalidModel` for impossible figures, before they are used in computations."""
    describe.check_architecture(header)
    for prefix in ("", "text_config."):
        for key in _LAYER_KEYS:
            describe.check_layers(header, prefix + key)


def _templates(paths: Mapping[str, Path]) -> dict[str, str]:
    """Returns the chat templates by names that begin with `TEMPLATES`: separate files, and those in JSON files.
    Separate files win (PreTrainedTokenizerBase of transformers). Raises `InvalidModel` for one that is too large."""
    files = [name for name in paths if name.endswith(".jinja")]
    if len(files) > _MOST_TEMPLATES:
        raise InvalidModel(f"it has {len(files)} chat templates; the most allowed are {_MOST_TEMPLATES}")
    templates = {f"{TEMPLATES}.{name}": describe.read_template(name, paths[name]) for name in files}
    if templates:
        return templates
    for file in (name for name in _TEMPLATE_HOLDERS if name in paths):
        for number, template in enumerate(_templates_in(read_object(paths[file], _MAX_CONFIG).get("chat_template"))):
            describe.check_template(file, len(template.encode()))
            templates[f"{TEMPLATES}.{file}.{number}"] = template
    return templates


def _templates_in(value: Any) -> Iterator[str]:
    """Yields the templates of a value: transformers accepts one template, or a list of objects with a name and a
    template each."""
    for entry in value if isinstance(value, list) else [value]:
        template = entry.get("template") if isinstance(entry, dict) else entry
        if isinstance(template, str):
            yield template


def _processor(paths: Mapping[str, Path]) -> dict[str, str]:
    """Returns the configuration of the processor of images and sound, by names that begin with `_PROCESSOR`."""
    if _PROCESSOR not in paths:
        return {}
    processor = read_object(paths[_PROCESSOR], _MAX_CONFIG)
    return {f"{_PROCESSOR}.{key}": str(processor[key])[:80] for key in (_IMAGES, _SOUNDS) if key in processor}


def context_length(header: ModelHeader) -> int | None:
    """Returns the context length in tokens; for a model with images, that of its text part."""
    for prefix in ("", "text_config."):
        for key in _CONTEXT_KEYS:
            if 0 < (length := integer(header, prefix + key, 0)) <= _LONGEST_CONTEXT:
                return length
    return None


def capabilities(header: ModelHeader, names: Collection[str]) -> frozenset[str]:
    """Returns the capabilities; none for an architecture that does not declare any: its engine decides."""
    architecture = header.architecture
    if architecture.endswith(_RANKS):
        return frozenset({"reranking" if _labels(header) == 1 else "classification"})
    if "modules.json" in names:  # sentence-transformers, also around a model that could generate
        return frozenset({"embedding"})
    if architecture.endswith(_GENERATES):
        senses = {name for name, marks in _SENSES.items() if any(key.startswith(marks) for key in header.metadata)}
        return frozenset({"completion"} | senses) | describe.abilities(header)
    return frozenset({"embedding"} if architecture.endswith(_ENCODES) else ())


def require_no_code(paths: Mapping[str, Path]) -> None:
    """Raises `UnsupportedModel` for a model that has Python code of its own, or has an engine import it. Checks the
    present files: some may still be on their way."""
    if code := _code_in(paths):
        raise UnsupportedModel(
            f"the model carries code: {code}. An engine that runs it runs that code: if you trust its"
            " publisher, use `--trust-remote-code`"
        )


def brings_code(paths: Mapping[str, Path]) -> bool:
    """Implements `Reader.brings_code`; reporting a damaged file is the engine's task."""
    try:
        return bool(_code_in(paths))
    except InvalidModel:
        return False


def _code_in(paths: Mapping[str, Path]) -> str:
    """Returns the first file that is code or names some, with the reason; "" if there is none."""
    for name in sorted(set(paths).difference(foreignformats.files_in(paths))):
        if reason := "is code" if is_code(name) else _named_code(name, paths[name]):
            return f"{name} {reason}"
    return ""


def _named_code(name: str, path: Path) -> str:
    """Returns the reason why a JSON file makes an engine run code; "" if it does not."""
    if name == "modules.json":
        kinds = [str(module.get("type")) for module in _list(path) if isinstance(module, dict)]
        foreign = [kind for kind in kinds if not kind.startswith("sentence_transformers.")]
        return f"names the module {foreign[0][:80]}" if foreign else ""
    if name.endswith(CONFIG) and any(key == "auto_map" for key in _keys(read_object(path, _MAX_CONFIG))):
        return "has an auto_map"
    return ""


def _check_names(names: Collection[str]) -> None:
    if CONFIG not in names:
        raise InvalidModel(f"there is no {CONFIG} beside its weights")
    for name in names:
        if not in_folder(name) and lora.name_and_scale(name) is None:
            raise InvalidModel(f"it has a file {name[:80]!r}, which is not part of a model")
    if len({name.casefold() for name in names}) != len(names):
        raise InvalidModel("two of its files have names that differ in case only")


def _architecture(metadata: Mapping[str, Any]) -> str:
    """Returns the class that transformers loads it with, else the kind of model."""
    match metadata.get("architectures"):
        case [str(first), *_]:
            return first
        case _:
            return str(metadata.get("model_type") or "")


def _labels(header: ModelHeader) -> int:
    """Returns the number of a classifier's classes; transformers' default is 2."""
    named = sum(key.startswith("id2label.") for key in header.metadata)
    return named or integer(header, "num_labels", 2)


def _tensors(paths: Mapping[str, Path]) -> tuple[Tensor, ...]:
    """Returns the tensors of the model itself: of its one file, or of its shards in their order. Modules in folders (a
    dense layer of sentence-transformers) are read too, adapters are not."""
    names = [name for name in sorted(paths) if name.endswith(WEIGHTS) and not lora.name_and_scale(name)]
    by_file = {name: safetensors.read_tensors(paths[name]) for name in names}
    tensors = {name: tensors for name, tensors in by_file.items() if "/" not in name}
    if not any(tensors.values()):
        raise InvalidModel("there is no safetensors file with tensors in it")
    if len(tensors) > 1 or INDEX in paths:
        _check_index(paths, tensors)
    return tuple(tensor for table in by_file.values() for tensor in table)


def _check_index(paths: Mapping[str, Path], tensors: Mapping[str, Collection[Tensor]]) -> None:
    if INDEX not in paths:
        raise InvalidModel(f"it has {len(tensors)} weight files but lacks {INDEX}")
    listed = read_object(paths[INDEX], _MAX_INDEX).get("weight_map")
    if not isinstance(listed, dict):
        raise InvalidModel(f"{INDEX} has no weight_map")
    there = {tensor.name: file for file, table in tensors.items() for tensor in table}
    if missing := sorted({str(file) for file in listed.values()}.difference(tensors)):
        raise InvalidModel(f"{missing[0][:80]} is missing: {INDEX} names it")
    if sum(map(len, tensors.values())) != len(there) or there != listed:
        raise InvalidModel(f"{INDEX} and the weight files disagree about the places of the tensors")


def _list(path: Path) -> list[Any]:
    value = boundedjson.read(path, _MAX_CONFIG)
    return value if isinstance(value, list) else []


def _keys(value: Any) -> Iterator[str]:
    """Yields the keys at any depth."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict(members):
                yield from members
                waiting.extend(members.values())
            case list(entries):
                waiting.extend(entries)


def _flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the members of nested objects, under their names joined by dots. Raises `InvalidModel` if they would take
    more than a few MiB: nested objects repeat the names of all levels."""
    flat: dict[str, Any] = {}
    waiting = [("", config)]
    kept = 0
    while waiting:
        prefix, members = waiting.pop()
        for key, value in members.items():
            kept += len(prefix) + len(key) + _cost(value)
            if kept > _MAX_KEPT:
                raise InvalidModel(f"{CONFIG} holds more than {_MAX_KEPT >> 20} MiB of names and values")
            match value:
                case None:
                    pass
                case dict():
                    waiting.append((f"{prefix}{key}.", value))
                case list() if len(value) > _LONGEST_KEPT_ARRAY or not _are_scalars(value):
                    flat[f"{prefix}{key}.length"] = len(value)
                case str() if len(value) > _LONGEST_KEPT_STRING:
                    flat[f"{prefix}{key}.length"] = len(value)
                case _:
                    flat[prefix + key] = value
    return flat


def _cost(value: Any) -> int:
    """Returns about how many bytes a value takes in memory."""
    match value:
        case str():
            return _ENTRY_SIZE + min(len(value), _LONGEST_KEPT_STRING)
        case list() if len(value) <= _LONGEST_KEPT_ARRAY:
            return _ENTRY_SIZE + sum(_cost(entry) for entry in value if not isinstance(entry, dict | list))
        case _:
            return _ENTRY_SIZE


def _are_scalars(values: Iterable[Any]) -> bool:
    return not any(isinstance(value, dict | list) for value in values)
