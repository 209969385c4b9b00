"""Models that other programs keep on this machine: Hugging Face's cache, Ollama's store, LM Studio's folder. Their
files are only read; files that are not models are skipped.

Layouts: huggingface_hub's guide "Manage your cache"; LM Studio's documentation, "Import models"; Ollama's manifests as
Docker's, with layers of its own types (https://github.com/ollama/ollama/blob/main/server/manifest.go, and model.go for
the content of the layers).
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelrunner import durable
from modelrunner.errors import InvalidModel, InvalidReference, ModelNotFound
from modelrunner.lora import LoraPath
from modelrunner.models.orders import Recipe
from modelrunner.pull.file import Extras, LocalFiles
from modelrunner.pull.huggingface import hub_home
from modelrunner.pull.linking import LinkKind, link_kind
from modelrunner.pull.ociregistry import CARRIED, ODD, carried
from modelrunner.pull.selection import folder_files, with_shards
from modelrunner.store import Digest, Reference
from modelrunner.store.mediatypes import OLLAMA_TYPE

_LARGEST = 1 << 20  # bytes of a manifest, or of a layer that is read
_MANIFESTS = ("manifests", "manifest-v2")  # the second one of newer releases


@dataclass(frozen=True, slots=True)
class KeptModel:
    """`layers` are its files by their kind."""

    name: str
    layers: Mapping[str, Sequence[Path]]

    @property
    def file(self) -> Path:
        return self.layers["model"][0]

    @property
    def extras(self) -> Extras:
        projector = next(iter(self._of("projector")), None)
        adapters = tuple([LoraPath(path.absolute()) for path in self._of("adapter")])
        return Extras(projector and projector.absolute(), lora=adapters)

    @property
    def size(self) -> int:
        """Returns the bytes of all files. Raises `OSError` for a file that is not there."""
        return sum(path.stat().st_size for kind in ("model", "projector", "adapter") for path in self._of(kind))

    def recipe(self) -> Recipe:
        """Returns the defaults that the model carries, without its template, which is in Go's language: the template in
        its weights takes its place. Parameters of a machine (`num_gpu`) are left out. Raises `InvalidModel`."""
        try:
            return self._recipe()
        except (*ODD, OSError) as error:
            raise InvalidModel(f"what {self.name} carries for requests cannot be read ({error})") from None

    def _recipe(self) -> Recipe:
        recipe = carried(
            {kind: [durable.read(path.resolve(), _LARGEST).decode() for path in self._of(kind)] for kind in CARRIED}
        )
        return Recipe(
            system=recipe.system, parameters=recipe.parameters, messages=recipe.messages, licences=recipe.licences
        )

    def _of(self, kind: str) -> Sequence[Path]:
        return self.layers.get(kind, ())


def ollama_models(root: Path) -> Iterator[KeptModel]:
    """Yields the models of a store; a manifest that is not a model is passed over."""
    manifests: list[Path] = []
    for name in _MANIFESTS:
        with contextlib.suppress(*ODD, OSError):
            manifests += (root / name).glob("*/*/*/*")
    for path in sorted(manifests):
        with contextlib.suppress(*ODD, OSError, InvalidReference):
            layers = _layers(path, root / "blobs")
            host, owner, model, tag = path.parts[-4:]
            if len(layers["model"]) == 1:
                yield KeptModel(f"{host}/{owner}/{model}:{tag}", layers)


def _layers(manifest: Path, blobs: Path) -> dict[str, list[Path]]:
    """Returns the layers of a manifest. Raises `ValueError`, `KeyError` and such for an odd one."""
    content: dict[str, Any] = json.loads(durable.read(manifest.resolve(), _LARGEST))
    layers: dict[str, list[Path]] = {}
    for layer in content["layers"]:
        digest = Digest.parse(layer["digest"])
        layers.setdefault(layer["mediaType"].removeprefix(OLLAMA_TYPE), []).append(blobs / f"sha256-{digest.hex}")
    return layers


_LONGEST_COMMIT = 1 << 10  # bytes of a file with the name of a commit
# What a file of another program may cause: no right to read it, a loop of links, a zero in a path, names that are no
# text, JSON of another shape. It costs its own model alone.
_ODD = (OSError, ValueError, RuntimeError, LookupError, TypeError, InvalidModel, InvalidReference)


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """`program` keeps it, `name` is the reference that it would get, `file` is its file or folder, `extras` are
    further files. `size` is in bytes; `cost` is the way of an import: reflink, hard link or copy;
    `recipe` reads the model's defaults for requests, and may raise `InvalidModel`."""

    program: str
    name: str
    file: Path
    size: int
    extras: Extras = Extras()  # noqa: RUF009  # it is immutable
    recipe: Callable[[], Recipe] = Recipe
    cost: LinkKind = LinkKind.COPY

    @property
    def source(self) -> LocalFiles:
        """Returns what `Puller.pull` takes."""
        return LocalFiles(self.file, self.extras, linked=True)


class ForeignStores:
    """`folders` are the folders of each program; by default those that its environment variables name, else its own
    default."""

    def __init__(
        self,
        hub: Path | None = None,
        ollama: tuple[Path, ...] | None = None,
        lmstudio: tuple[Path, ...] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        home = Path(os.path.expanduser("~"))
        self._hub = hub or Path(environ.get("HF_HUB_CACHE") or hub_home(environ) / "hub")
        set_by_user = environ.get("OLLAMA_MODELS")
        defaults = (home / ".ollama/models", Path("/usr/share/ollama/.ollama/models"))
        self._ollama = ollama or ((Path(set_by_user),) if set_by_user else defaults)
        self._lmstudio = lmstudio or (home / ".lmstudio/models", home / ".cache/lm-studio/models")

    def find(self, store_folder: Path) -> list[ForeignModel]:
        """Returns all models, sorted by name. `store_folder` is the folder of the store into which a file
        would be linked or copied. Blocks."""
        everything = [*self._in_hub(), *self._in_ollama(), *self._in_lmstudio()]
        kinds: dict[int, LinkKind] = {}
        models = []
        for model in sorted({each.name: each for each in reversed(everything)}.values(), key=lambda each: each.name):
            with contextlib.suppress(*_ODD):  # it was removed meanwhile
                device = os.stat(model.file).st_dev
                if device not in kinds:
                    kinds[device] = link_kind(_some_file(model.file), store_folder)
                models.append(replace(model, cost=kinds[device]))
        return models

    def get(self, name: str, store_folder: Path) -> ForeignModel:
        """Returns the model with this name, or with a unique part of it. Raises `ModelNotFound`, `InvalidReference`."""
        models = self.find(store_folder)
        exact = [model for model in models if name in (model.name, str(Reference.parse(model.name)))]
        matching = exact or [model for model in models if name.lower() in model.name.lower()]
        if not matching:
            raise ModelNotFound(f"no other program here keeps a model {name!r}: `modelrunner import` lists them")
        if len(matching) > 1:
            names = ", ".join(model.name for model in matching[:10])
            raise InvalidReference(f"{name!r} could be any of {names}: write more of it", param="name")
        return matching[0]

    def _in_hub(self) -> Iterator[ForeignModel]:
        for repository in _folders(self._hub, "models--*"):
            with contextlib.suppress(*_ODD):
                yield from _in_repository(repository)

    def _in_lmstudio(self) -> Iterator[ForeignModel]:
        for root in self._lmstudio:
            for folder in _folders(root, "*/*"):
                with contextlib.suppress(*_ODD):
                    yield from _ggufs("LM Studio", f"hf.co/{folder.parent.name}/{folder.name}", folder)

    def _in_ollama(self) -> Iterator[ForeignModel]:
        for model in (model for root in self._ollama for model in ollama_models(root)):
            with contextlib.suppress(*_ODD):
                yield from _named("Ollama", model.name, model.file, model.size, model.extras, model.recipe)


def _in_repository(repository: Path) -> Iterator[ForeignModel]:
    """Yields the models of a repository in the hub's cache."""
    commit = durable.read((repository / "refs/main").resolve(), _LONGEST_COMMIT).decode("ascii").strip()
    if "/" in commit or commit.startswith("."):
        return
    name = "hf.co/" + repository.name.removeprefix("models--").replace("--", "/", 1)
    snapshot = repository / "snapshots" / commit
    if folder := folder_files(_names(snapshot), trust=False):
        size = sum(os.stat(snapshot / file).st_size for file in folder)
        yield from _named("Hugging Face", name, snapshot, size)
    for place in (snapshot, *_folders(snapshot, "*")):
        yield from _ggufs("Hugging Face", name, place)


def _ggufs(program: str, name: str, folder: Path) -> Iterator[ForeignModel]:
    files = sorted(file for file in _names(folder) if file.endswith(".gguf") and "/" not in file)
    projectors = [file for file in files if "mmproj" in file.lower()]
    extras = Extras((folder / projectors[0]).absolute() if projectors else None)
    for file in files:
        if file in projectors or "imatrix" in file.lower():
            continue
        with contextlib.suppress(*_ODD):
            shards = with_shards(files, file)
            if next(iter(shards.values())) == file:
                size = sum(os.stat(folder / shard).st_size for shard in (*shards.values(), *projectors[:1]))
                stem = file.removesuffix(".gguf").partition("-00001-of-")[0]
                yield from _named(program, f"{name}:{stem}", folder / file, size, extras)


def _named(
    program: str,
    name: str,
    file: Path,
    size: int,
    extras: Extras = Extras(),  # noqa: B008  # it is immutable
    recipe: Callable[[], Recipe] = Recipe,
) -> Iterator[ForeignModel]:
    """Yields the model, or nothing if its name is not a reference, or its path is not text."""
    with contextlib.suppress(InvalidReference, UnicodeEncodeError):
        str(file).encode()
        yield ForeignModel(program, Reference.parse_name(name).short, file.absolute(), size, extras, recipe)


def _folders(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in root.glob(pattern) if path.is_dir())
    except _ODD:
        return []


def _names(folder: Path) -> list[str]:
    """Returns the names of the files in the folder and in its subfolders, one level deep."""
    try:
        places = [folder, *(path for path in folder.iterdir() if path.is_dir())]
        return [str(path.relative_to(folder)) for place in places for path in place.iterdir() if path.is_file()]
    except _ODD:
        return []


def _some_file(path: Path) -> Path:
    return path / _names(path)[0] if path.is_dir() else path
