"""Pushes a model of the store to a registry: its files first, its manifest last."""

from collections.abc import Callable
from pathlib import Path

from modelrunner.concurrency.threads import in_thread
from modelrunner.errors import BadRequest, InvalidModel
from modelrunner.oci import signatures
from modelrunner.oci.credentials import Credentials
from modelrunner.oci.registries import Registries
from modelrunner.oci.repository import Manner, RemoteRepository
from modelrunner.oci.upload import Upload
from modelrunner.progress import FileProgress, ProgressReport, WorkProgress
from modelrunner.store import Blob, Digest, Reference, Store
from modelrunner.store.manifests import StoredFile, parse
from modelrunner.store.mediatypes import MANIFEST_TYPE
from modelrunner.store.references import NO_REGISTRIES


class Pusher:
    def __init__(
        self, store: Store, registries: Registries, credentials: Credentials, manner: Manner | None = None
    ) -> None:
        self._store, self._registries, self._credentials = store, registries, credentials
        self._manner = manner or Manner()

    async def push(
        self,
        text: str,
        target: str | None,
        report: ProgressReport,
        *,
        token: str | None = None,
        key: Path | None = None,
    ) -> str:
        """Pushes the model `text` under the name `target`, by default its own, and returns that name with the digest.
        `token` goes to the registry alone; the private key in the file `key` signs the model there. Files that the
        registry has are not sent. After a failure the sent files stay there, so the next push continues. Raises
        `ModelNotFound`, `InvalidReference`, `BadRequest` for a name without a registry, `InvalidModel` for a damaged
        model, `SourceFailed`."""
        model, reference = self._store.get(text), self._target(text, target)
        signer = await in_thread(lambda _: signatures.private_key(key)) if key is not None else None
        manifest = await in_thread(lambda _: self._store.manifest(model.id))
        parsed = parse(manifest)
        files = {layer.stored().digest: layer.stored() for layer in (parsed.config, *parsed.layers)}
        blobs = {digest: self._blob(file) for digest, file in files.items()}
        endpoint = self._registries.origin(reference.host)
        sources = sorted({tag.path for tag in map(Reference.parse, model.tags) if tag.host == reference.host})
        others = [path for path in sources if path != reference.path]
        report(WorkProgress(f"Pushing {reference.short}", "resolving"))
        repository = await RemoteRepository.open(
            endpoint,
            reference.path,
            self._credentials,
            token=token,
            manner=self._manner,
            actions="pull,push",
            sources=others,
        )
        async with repository:
            total, done = sum(file.size for file in files.values()), 0
            for digest, file in files.items():
                reported = _reporter(report, file, done, total)
                await Upload(repository, file, blobs[digest].path, others, reported).run()
                done += file.size
            await repository.put_manifest(manifest, parsed.media_type or MANIFEST_TYPE, reference.tag)
            if signer is not None:
                await signatures.sign(repository, Digest.parse(model.id), signer, reference.name)
        return f"{reference.short}@{model.id}"

    def _target(self, text: str, target: str | None) -> Reference:
        """Returns the name that the model gets at the registry. Raises `BadRequest`."""
        if target is not None:
            names = [Reference.parse_name(target)]
        else:
            model = self._store.get(text)
            names = sorted(map(Reference.parse, model.tags), key=lambda name: name.short != text)
        for name in names:
            if name.host not in NO_REGISTRIES:
                return name
        raise BadRequest(f"{text} has no registry in its name: write `modelrunner push {text} HOST/NAME`", param="to")

    def _blob(self, file: StoredFile) -> Blob:
        blob = self._store.have(str(file.digest))
        if blob is None or blob.size != file.size:
            raise InvalidModel(f"its file {file.digest} is missing or damaged: pull the model again")
        return blob


def _reporter(report: ProgressReport, file: StoredFile, done: int, total: int) -> Callable[[int], None]:
    def advanced(current: int) -> None:
        part = FileProgress(str(file.digest), file.size, current)
        report(WorkProgress(f"Pushing file {_short(file.digest)}", "pushing", total, done + current, part))

    return advanced


def _short(digest: Digest) -> str:
    return str(digest)[:19]
