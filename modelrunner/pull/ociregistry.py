"""`[HOST[:PORT]/]NAME[:TAG][@DIGEST]`: models in OCI registries, as docker/model-runner and ModelPack publish them.

A model keeps the manifest that it was published with, byte for byte. Ollama's models, and files that ORAS has pushed,
have manifests of other kinds: they get one of ours.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from modelrunner import chattemplates
from modelrunner.concurrency.threads import HASHING, in_thread
from modelrunner.defaults import ModelDefaults, SamplingOptions, split_parameters
from modelrunner.errors import BadRequest, InvalidModel, InvalidReference, ModelNotFound, SourceFailed, UntrustedModel
from modelrunner.oci import imageindex, signatures
from modelrunner.oci.credentials import Credentials
from modelrunner.oci.registries import Registries
from modelrunner.oci.repository import INDEX_TYPES, Manner, RemoteManifest, RemoteRepository
from modelrunner.progress import WorkProgress
from modelrunner.pull.archives import unpack_layers
from modelrunner.pull.fetching import fetch_files
from modelrunner.pull.remoteheader import preview_gguf
from modelrunner.pull.source import Context, FetchResult, Making, Preview, PullSpec, Source
from modelrunner.store import Digest
from modelrunner.store.details import LARGEST_LICENCE
from modelrunner.store.manifests import (
    LARGEST,
    Descriptor,
    Manifest,
    StoredFile,
    archives,
    decode,
    decode_config,
    parse,
)
from modelrunner.store.mediatypes import FOREIGN_CONFIG_TYPES, LICENSE_TYPE, OLLAMA_TYPE, LayerKind
from modelrunner.store.names import in_folder
from modelrunner.store.references import NO_REGISTRIES, Reference
from modelrunner.store.safetensors_model import require_no_code
from modelrunner.web.session import HubAnswer

T = TypeVar("T")
log = logging.getLogger(__name__)
_MOST_LICENCES = 8
_LICENCES = (LICENSE_TYPE, f"{OLLAMA_TYPE}license")
_SMALL = 16 << 20  # bytes of a file that may say that the model carries code
CARRIED = ("system", "params", "messages", "license")
"""The kinds of layers that are read."""
ODD = (ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""The errors of JSON of another shape."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A model in a repository; `revision` is the digest that the name stands for, which may be that of an image
    index."""

    manifest: RemoteManifest
    parsed: Manifest
    revision: Digest

    @property
    def files(self) -> list[StoredFile]:
        """Returns the files, each once, the small ones first."""
        layers = {layer.stored().digest: layer.stored() for layer in (self.parsed.config, *self.parsed.layers)}
        return sorted(layers.values(), key=lambda file: file.size)


class RegistrySource(Source):
    signs = True

    def __init__(self, registries: Registries, credentials: Credentials, manner: Manner | None = None) -> None:
        self._registries, self._credentials = registries, credentials
        self._manner = manner or Manner()

    def claims(self, text: str) -> bool:
        """Returns whether `text` is a reference that no other source claims: ask this source last."""
        try:
            return Reference.parse(text).host not in NO_REGISTRIES
        except InvalidReference:
            return False

    def must_ask(self, wanted: PullSpec) -> bool:
        return super().must_ask(wanted) or bool(self._registries.keys(Reference.parse(wanted.text).host))

    async def revision(self, wanted: PullSpec) -> str | None:
        async def look_up(repository: RemoteRepository, reference: Reference) -> str:
            return str((await self._find(repository, reference, wanted)).revision)

        return await self._ask(wanted.text, wanted.token, look_up)

    async def preview(self, text: str, folder: Path, token: str | None) -> Preview:
        async def look_up(repository: RemoteRepository, reference: Reference) -> Preview:
            return await _preview(repository, reference, folder)

        return await self._ask(text, token, look_up)

    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        context.report(WorkProgress(f"Looking up {wanted.text}", "resolving"))

        async def fetch(repository: RemoteRepository, reference: Reference) -> FetchResult:
            return await self._fetch(repository, await self._find(repository, reference, wanted), wanted, context)

        return await self._ask(wanted.text, wanted.token, fetch)

    async def _ask(
        self, text: str, token: str | None, work: Callable[[RemoteRepository, Reference], Awaitable[T]]
    ) -> T:
        """Returns the result of `work` at the first of the registry's endpoints that does not fail."""
        reference = Reference.parse(text)
        endpoints = self._registries.endpoints(reference.host)
        for endpoint in endpoints:
            own = endpoint is endpoints[-1]
            repository = await RemoteRepository.open(
                endpoint, reference.path, self._credentials, token=token if own else None, manner=self._manner
            )
            async with repository:
                try:
                    return await work(repository, reference)
                except (SourceFailed, ModelNotFound, UntrustedModel, InvalidModel) as error:
                    if own:
                        raise
                    log.warning("the mirror %s cannot serve %s: %s", endpoint.host, reference, error)
        raise AssertionError("the last endpoint returns or raises")

    async def _find(self, repository: RemoteRepository, reference: Reference, wanted: PullSpec) -> _Found:
        """Finds the model and checks its signature. Raises `UntrustedModel` unless the model is signed as the
        registry's rules and the caller demand."""
        remote = await _find(repository, reference)
        digests = list(dict.fromkeys((remote.revision, remote.manifest.digest)))
        if paths := self._registries.keys(reference.host):
            keys = await in_thread(lambda _: signatures.read_public_keys(paths))
            await signatures.require_signature(repository, digests, keys)
        if wanted.verify_key is not None:
            key = signatures.public_key(wanted.verify_key.encode(), "verify-key")
            await signatures.require_signature(repository, digests, [key])
        return remote

    async def _fetch(
        self, repository: RemoteRepository, remote: _Found, wanted: PullSpec, context: Context
    ) -> FetchResult:
        if remote.parsed.config.media_type in FOREIGN_CONFIG_TYPES:
            return await _fetch_foreign(repository, remote, context)
        stored = {file.digest: await context.stored(file.digest.hex) for file in remote.files}
        wanting = {file.digest: repository.remote_file(file) for file in remote.files if stored[file.digest] is None}
        paths = {digest: context.partial(file) for digest, file in wanting.items()}

        async def check() -> None:
            if not wanted.trust:
                await in_thread(lambda _: require_no_code(_named(remote.parsed, paths, stored)))

        def late(digest: Digest) -> bool:
            return wanting[digest].size > _SMALL

        for digest in await fetch_files(wanting, context, repository.downloader(), late=late, check=check):
            del paths[digest]
            stored[digest] = await context.stored(digest.hex)
        unpacked = await in_thread(
            lambda stop: unpack_layers(
                remote.parsed, lambda digest: paths.get(digest) or stored[digest], context.folder, stop
            ),
            HASHING,
        )
        return FetchResult(
            files={digest.hex: path for digest, path in paths.items()}
            | {name: path for name, (path, _) in unpacked.items()},
            digests={digest.hex: digest.hex for digest in paths},
            stored={digest.hex: digest.hex for digest in stored if digest not in paths},
            revision=str(remote.revision),
            version=str(remote.revision),
            manifest=remote.manifest.data,
            unpacked={name: origin for name, (_, origin) in unpacked.items()},
        )


async def _fetch_foreign(repository: RemoteRepository, remote: _Found, context: Context) -> FetchResult:
    """Fetches the files of a model whose manifest is of another kind: it gets one of ours. What a model of Ollama
    carries for requests comes along."""
    if archives(remote.parsed):
        raise InvalidModel("its files are packed in archives without a model's configuration: publish them one by one")
    contents = decode(remote.manifest.data, remote.manifest.digest)
    stored = {file.digest: await context.stored(file.digest.hex) for file in contents.files.values()}
    wanting = {
        file.digest: repository.remote_file(file) for file in contents.files.values() if stored[file.digest] is None
    }
    paths = {digest: context.partial(file) for digest, file in wanting.items()}

    async def check() -> None:
        """Nothing in these manifests says that a model carries code; the store looks at its files."""

    for digest in await fetch_files(wanting, context, repository.downloader(), late=lambda _: False, check=check):
        del paths[digest]
    names = {name: file.digest for name, file in contents.files.items()}
    return FetchResult(
        files={name: paths[digest] for name, digest in names.items() if digest in paths},
        digests={name: digest.hex for name, digest in names.items() if digest in paths},
        stored={name: digest.hex for name, digest in names.items() if digest not in paths},
        revision=str(remote.revision),
        version=str(remote.revision),
        making=await _making(repository, remote.parsed.layers),
    )


async def _making(repository: RemoteRepository, layers: Sequence[Descriptor]) -> Making:
    """Returns what Ollama's layers say. Raises `InvalidModel`."""
    texts: dict[str, list[str]] = {}
    for layer in layers:
        if (kind := layer.media_type.removeprefix(OLLAMA_TYPE)) in CARRIED:
            texts.setdefault(kind, []).append(await _text(repository, layer, LARGEST_LICENCE))
    try:
        recipe = carried(texts)
        messages = [{"role": role, "content": content} for role, content in recipe.messages]
        fields = {"system": recipe.system, "messages": messages, **split_parameters(recipe.parameters)}
        return Making(ModelDefaults.parse(fields), None, tuple(recipe.licences[:_MOST_LICENCES]))
    except (*ODD, BadRequest, msgspec.ValidationError) as error:
        raise InvalidModel(f"what it carries for requests cannot be read ({error})") from None


async def _find(repository: RemoteRepository, reference: Reference) -> _Found:
    """Finds the manifest of the reference. Raises `InvalidModel` for a manifest of no model."""
    manifest = await repository.manifest(str(reference.digest or reference.tag))
    revision = manifest.digest
    if manifest.media_type in INDEX_TYPES:
        manifest = await repository.manifest(str(imageindex.choose(manifest.data)))
    parsed = parse(manifest.data)
    archives(parsed)  # fails before archives are fetched that cannot be unpacked
    if parsed.config.size > LARGEST:
        raise InvalidModel(f"its configuration has {parsed.config.size} bytes")
    return _Found(manifest, parsed, revision)


async def _preview(repository: RemoteRepository, reference: Reference, folder: Path) -> Preview:
    """Reads the configuration, the licences, a template and, for a model in one GGUF file, its header."""
    remote = await _find(repository, reference)
    layers = remote.parsed.layers
    kinds = [layer.use.kind for layer in layers]
    template = next((layer for layer, kind in zip(layers, kinds, strict=True) if kind is LayerKind.TEMPLATE), None)
    bundle = None
    if [kind for kind in kinds if kind not in (LayerKind.TEMPLATE, LayerKind.OTHER)] == [LayerKind.GGUF]:
        file = repository.remote_file(layers[kinds.index(LayerKind.GGUF)].stored())

        async def part(range: str, limit: int) -> HubAnswer:
            return await repository.request("GET", file.url, {"Range": range}, limit=limit)

        bundle = await preview_gguf(file, part, reference.short, folder)
    config: dict[str, Any] = {}
    try:
        if remote.parsed.config.media_type not in FOREIGN_CONFIG_TYPES:
            config = decode_config(await repository.blob(remote.parsed.config.stored(), LARGEST))
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidModel(f"its configuration cannot be parsed ({error})") from None
    licences = [layer for layer in layers if layer.media_type in _LICENCES][:_MOST_LICENCES]
    return Preview(
        sum(file.size for file in remote.files),
        bundle,
        files={layer.path or f"{layer.media_type} {layer.digest[:19]}": layer.size for layer in layers},
        version=str(remote.manifest.digest),
        format=str(config.get("format", "")),
        config=config,
        template=await _text(repository, template, chattemplates.LARGEST) if template else "",
        licences=tuple([await _text(repository, layer, LARGEST_LICENCE) for layer in licences]),
    )


async def _text(repository: RemoteRepository, layer: Descriptor, limit: int) -> str:
    """Returns a small file as text, "" for a file of more than `limit` bytes."""
    if layer.size > limit:
        return ""
    return (await repository.blob(layer.stored(), limit)).decode("utf-8", "replace")


def _named(parsed: Manifest, paths: Mapping[Digest, Path], stored: Mapping[Digest, Path | None]) -> dict[str, Path]:
    """Returns the files that are here, by the names that they were published with."""
    places = [(layer.path, layer.stored().digest) for layer in parsed.layers]
    files = {name: paths.get(digest) or stored.get(digest) for name, digest in places if in_folder(name)}
    return {name: path for name, path in files.items() if path is not None and path.is_file()}


class OllamaDefaults(NamedTuple):
    """`parameters` are Ollama's options, without those of a machine (`num_gpu`); `messages` are role and content."""

    system: str | None
    parameters: dict[str, Any]
    messages: list[tuple[str, str]]
    licences: list[str]


def carried(texts: Mapping[str, Iterable[str]]) -> OllamaDefaults:
    """Reads the texts of a model's layers, by their kinds (https://github.com/ollama/ollama/blob/main/server/model.go).
    The template is in Go's language, and left out: the one in the weights takes its place. Raises one of `ODD`."""
    parameters: dict[str, Any] = {}
    for text in texts.get("params", ()):
        parameters |= json.loads(text)
    known = (*SamplingOptions.__struct_fields__, "num_ctx")
    messages = [message for text in texts.get("messages", ()) for message in json.loads(text)]
    return OllamaDefaults(
        "\n".join(texts.get("system", ())) or None,
        {name: value for name, value in parameters.items() if name in known},
        [(str(message["role"]), str(message["content"])) for message in messages],
        [text for text in texts.get("license", ()) if text],
    )
