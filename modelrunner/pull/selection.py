"""Chooses the files of the wanted model from those in one place. Pure: names in, names out."""

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from modelrunner.errors import InvalidModel, ModelNotFound, UnsupportedModel
from modelrunner.store import foreignformats
from modelrunner.store.names import CONFIG, INDEX, WEIGHTS, in_folder, is_code

# The default order: the 4-bit K-quant that llama.cpp and its users treat as the default, then the nearest
# to it in size, the larger first. A quantization that is not listed comes after these, by name.
DEFAULT_ORDER = (
    *("Q4_K_M", "Q4_K_L", "Q4_K_S", "UD-Q4_K_XL", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4_MOE", "MXFP4"),
    *("Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "BF16", "F16", "F32"),
)
# Projectors are small and lose most by being quantized.
_PROJECTOR_ORDER = ("F16", "BF16", "Q8_0", "F32")

_QUANTIZATION = re.compile(
    r"(?:^|(?<=[-_./]))(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4)(?=$|[-_./])", re.I
)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$", re.I)
_SAFETENSORS, _SAFETENSORS_SHARD = "model.safetensors", re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class _Candidate:
    stem: str
    quantization: str
    files: tuple[str, ...]

    def order(self, preferred: Iterable[str]) -> tuple[int, str, int, str]:
        ranks = {name: rank for rank, name in enumerate(preferred)}
        rank = ranks.get(self.quantization, len(ranks))
        return rank, self.quantization, self.stem.count("/"), self.stem

    def answers(self, wanted: str) -> bool:
        wanted = wanted.upper().removesuffix(".GGUF")
        return wanted in (self.quantization, self.stem.rpartition("/")[2].upper())


def choose(names: Iterable[str], wanted: str | None, place: str) -> dict[str, str]:
    """Maps the names inside the bundle (`model.gguf`, or `model-00001-of-00003.gguf` and so on, first the model, then
    `mmproj.gguf` if there is a projector) to the names in the source.

    `wanted` is a quantization or a file's name, in any case; None takes the first of `DEFAULT_ORDER`. Among several
    files of one quantization, the one in the outermost folder is taken, then the first by name. Raises
    `UnsupportedModel` for a place without GGUF, and `ModelNotFound`, which lists the quantizations, for one without
    `wanted`; `place` names the source in both.
    """
    candidates = _candidates(names)
    models = _models(candidates)
    projectors = [c for c in candidates if "mmproj" in c.stem.lower()]
    if not models:
        raise UnsupportedModel(
            f"{place} holds no complete model in GGUF, safetensors or a format of a backend; look for a conversion"
        )
    matching = [c for c in models if wanted is None or c.answers(wanted)]
    if not matching:
        offered = sorted({c.quantization or c.stem.rpartition("/")[2] for c in models})
        raise ModelNotFound(f"{place} has no quantization {wanted}; it has {', '.join(offered)}")
    model = min(matching, key=lambda c: c.order(DEFAULT_ORDER))
    chosen = dict(zip(_bundle_names(len(model.files)), model.files, strict=True))
    if projectors:
        chosen["mmproj.gguf"] = min(projectors, key=lambda c: c.order(_PROJECTOR_ORDER)).files[0]
    return chosen


def quantizations(names: Iterable[str]) -> list[str]:
    """Returns the quantizations that `choose` finds, the one that it takes by default first."""
    models = sorted(_models(_candidates(names)), key=lambda c: c.order(DEFAULT_ORDER))
    return list(dict.fromkeys(model.quantization for model in models if model.quantization))


def _models(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    return [c for c in candidates if not any(word in c.stem.lower() for word in ("mmproj", "imatrix"))]


def _candidates(names: Iterable[str]) -> list[_Candidate]:
    """Returns the GGUF files, the shards of one model together; incomplete sets of shards are left out."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names, key=lambda name: (name.lower(), name)):
        if name.lower().endswith(".gguf"):
            stem = name[: -len(".gguf")]
            shard = _SHARD.search(stem)
            group = (stem[: shard.start()].lower(), int(shard[2])) if shard else (stem, 1)
            groups.setdefault(group, []).append(name)
    return [
        _Candidate(stem := _stem(files[0]), quantization_of(stem), tuple(files))
        for (_, count), files in groups.items()
        if len(files) == count
    ]


def _stem(file: str) -> str:
    """Returns the file's name without its ending and the number of its shard."""
    stem = file[: -len(".gguf")]
    return stem[: shard.start()] if (shard := _SHARD.search(stem)) else stem


def quantization_of(name: str) -> str:
    """Returns the last quantization named in a file's name or its folders, in capitals; "" if there is none."""
    quantizations = _QUANTIZATION.findall(name)
    return re.sub("^FP", "F", quantizations[-1].upper()) if quantizations else ""


def _bundle_names(count: int) -> list[str]:
    if count == 1:
        return ["model.gguf"]
    return [f"model-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def with_shards(names: Iterable[str], file: str) -> dict[str, str]:
    """Maps names as `choose` does, for one named file with its other shards, if it has some. Raises `InvalidModel` if
    one is missing."""
    stem = file[: -len(".gguf")] if file.lower().endswith(".gguf") else file
    shard = _SHARD.search(stem)
    if shard is None:
        return {"model.gguf": file}
    count, here = int(shard[2]), {name.lower(): name for name in names}
    files = [f"{stem[: shard.start()]}-{number:05}-of-{shard[2]}.gguf" for number in range(1, count + 1)]
    if missing := [name for name in files if name.lower() not in here]:
        raise InvalidModel(f"{missing[0]} is missing: {file} is one of {count} files")
    return dict(zip(_bundle_names(count), [here[name.lower()] for name in files], strict=True))


def folder_files(names: Iterable[str], *, trust: bool) -> list[str]:
    """Returns the files of a model in safetensors, the weights last, from those of a folder as Hugging Face's libraries
    write it, or those of a model in a backend's format; [] if there are none. Other files are left out: the same
    weights in other formats, pictures, and code unless `trust` is set."""
    names = list(names)
    if foreign := foreignformats.files_in(names):
        return foreign
    kept = [name for name in sorted(names) if in_folder(name) and (trust or not is_code(name))]
    weights = [name for name in kept if name.endswith(WEIGHTS) and "/" not in name]
    if INDEX in kept:
        chosen = [name for name in weights if _SAFETENSORS_SHARD.fullmatch(name)]
    else:
        chosen = [_SAFETENSORS] if _SAFETENSORS in weights else weights
    if not chosen:
        return []
    modules = [name for name in kept if name.endswith(WEIGHTS) and "/" in name]
    return [*(name for name in kept if not name.endswith(WEIGHTS)), *modules, *chosen]


def folder_in(names: Iterable[str], *, trust: bool) -> dict[str, str]:
    """Maps the names in the bundle to those in an archive, as `folder_files` chooses them from the outermost folder
    with a config.json or a file of a backend's format."""
    names = sorted(names)
    files = [(name, name.rpartition("/")[2]) for name in names]
    roots = {name.removesuffix(file) for name, file in files if file == CONFIG or foreignformats.is_file(file)}
    # Files of a root and of its folders can be chosen. Of those deeper, it only matters whether there are weights.
    inside: dict[str, set[str]] = {root: set() for root in roots}
    for name, file in files:
        folder = name.removesuffix(file)
        for root in roots.intersection((folder, folder[: folder.rfind("/", 0, -1) + 1])):
            inside[root].add(name.removeprefix(root))
    weights = [name for name in names if name.endswith(WEIGHTS)]
    for root in sorted(roots, key=lambda root: (root.count("/"), root)):
        first = bisect_left(weights, root)
        inside[root].update(name.removeprefix(root) for name in weights[first : first + 1] if name.startswith(root))
        if chosen := folder_files(inside[root], trust=trust):
            return {name: root + name for name in chosen}
    return {}
