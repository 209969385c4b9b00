"""The interfaces of what models are pulled from, and the values that they take and return."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from modelrunner import wire
from modelrunner.defaults import ModelDefaults
from modelrunner.durable import discard
from modelrunner.errors import BadRequest
from modelrunner.progress import ProgressReport
from modelrunner.store.digests import Digest
from modelrunner.store.references import Reference
from modelrunner.types import Bundle, ModelFormat
from modelrunner.web.download import Downloader
from modelrunner.web.partial import RemoteFile
from modelrunner.web.transfers import Transfers


@dataclass(frozen=True, slots=True)
class Making:
    """The values that a model is to carry beside its files: `template` is the text of a chat template in place of the
    model's own; the licences are texts."""

    defaults: ModelDefaults | None = None
    template: str | None = None
    licences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PullSpec:
    """The wanted result of a pull. `text` is its origin as the caller wrote it, `origin` the normal form; `reference`
    is the name that the model gets. `token` goes to the source and nowhere else. `trust` accepts a model that carries
    code. `verify` reads every byte of a model that is here already. `verify_key`, in PEM, must have signed it. `making`
    is for a model that gets a manifest of ours. `folder` is the store's folder for the model."""

    text: str
    origin: str
    reference: Reference
    token: str | None = field(default=None, repr=False)
    trust: bool = False
    verify: bool = False
    verify_key: str | None = None
    making: Making | None = None
    folder: Path | None = None

    @property
    def key(self) -> str:
        """Returns a key that is equal for pulls that can be one download."""
        trusted = " trusted" if self.trust else ""
        text = f"{self.origin} {self.reference}{trusted} {self.verify_key or ''} {self.making or ''}"
        return f"{text} {self.folder or ''}".rstrip()


@dataclass(frozen=True, slots=True)
class PullResult:
    """A model in the store: its ID, and the name that this pull gave it. `cached` is True if it was there before."""

    id: str
    name: str
    cached: bool = False


@dataclass(frozen=True, slots=True)
class FromArchive:
    """The origin of an unpacked file: the sha256 of the archive, and the file's name in it."""

    archive: str
    path: str


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The files of a model, complete. `files` maps the name inside the bundle (`model.gguf`, `config.json`) to the path
    that the source wrote or was given; `digests` holds the sha256 (64 hex digits) of those for which the source gives
    one. `stored` holds the sha256 of those that the store has already. `revision` is that of `Source.revision`, None
    for a source without revisions; `version` is a commit, a digest or a version for people. A model that was published
    with a `manifest` keeps it; then the names have no meaning, and `unpacked` lists the files from its archives. One
    without may bring values of its own, the `making`."""

    files: Mapping[str, Path]
    digests: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None
    manifest: bytes | None = None
    unpacked: Mapping[str, FromArchive] = field(default_factory=dict)
    version: str = ""
    making: Making | None = None


@dataclass(frozen=True, slots=True)
class Preview:
    """A description of a model before it is pulled: `size`, the bytes that a pull would download, and the future
    `bundle`, without its files, if the source serves a part of a file. `files` are the sizes by the names at the
    source, which may be hostile; `version` is that of `FetchResult`. `format` is "" if unknown; `config` holds the
    source's own values under the names of `GET /models`. `template` is a chat template in a file of its own; the
    licences are texts or their names."""

    size: int
    bundle: Bundle | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    version: str = ""
    format: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    template: str = ""
    licences: tuple[str, ...] = ()


class Context:
    """The working place of a source for one pull: `folder` is its own and is kept for the next attempt; its content is
    not trusted. `report` takes its progress. `stored` returns the file that the store holds with a sha256 (64 hex
    digits), intact, or None. `transfers` are the limits of all downloads."""

    def __init__(
        self,
        folder: Path,
        report: ProgressReport,
        stored: Callable[[str], Awaitable[Path | None]],
        transfers: Transfers | None = None,
    ) -> None:
        self.folder, self.report, self.stored = folder, report, stored
        self.transfers = transfers or Transfers()

    async def require_quota(self, files: Mapping[Hashable, int]) -> None:
        """Takes room in the quota for `files`, as `Claim.require` does, until the pull is over."""

    def partial(self, file: RemoteFile) -> Path:
        """Returns the path of the partial file."""
        return self.folder / file.partial_name

    async def fetch(self, file: RemoteFile, downloader: Downloader, advanced: Callable[[int], None]) -> Path | None:
        """Downloads the file and returns its path, None if the store has received it meanwhile. A file with a sha256 is
        downloaded once for all pulls that need it. Raises the errors of `Downloader.fetch`."""
        await downloader.fetch(file, self.partial(file), advanced, self.transfers)
        return self.partial(file)


class Fetcher(ABC):
    """That which brings the files of a model. It holds no state of a pull."""

    @abstractmethod
    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        """Brings the files, and continues with the files that an earlier attempt left in the folder. Code of a model is
        left out, unless `wanted.trust` is set. When cancelled, it returns only when nothing writes there any more.
        Raises `ModelNotFound`, `SourceFailed`, `InvalidModel`, `InsufficientDisk`, and `OSError` for the folder
        itself."""

    async def revision(self, wanted: PullSpec) -> str | None:
        """Returns the source's present state as a text that changes with it; the question is cheap. None means that
        only a fetch can tell. Raises the errors of `fetch`."""
        return None

    def must_ask(self, wanted: PullSpec) -> bool:
        """Returns whether the source must be asked about a model in the store even if its digest is given, because a
        signature is required."""
        return wanted.verify_key is not None


class LocalOrigin(Fetcher):
    """One model that is made of files on this machine: a value. Its text (`str`) is for people, and equal for equal
    ones."""

    @property
    def sent(self) -> Collection[Digest]:
        """The digests of the files that a client sent for it."""
        return ()

    @property
    def made_of(self) -> str:
        """The reference of the stored model whose ID is its revision, "" for none."""
        return ""


class Source(Fetcher):
    """One kind of source of models, which are named by texts. With `signs`, its models may have signatures."""

    signs: ClassVar[bool] = False

    @abstractmethod
    def claims(self, text: str) -> bool:
        """Returns whether `text` has this source's form (`pypi:...`), even if it is invalid in other ways."""

    def name(self, text: str) -> Reference:
        """Returns the model's default name. Raises `InvalidReference`."""
        return Reference.parse(text)

    def normal(self, text: str) -> str:
        """Returns the normal form of `text`. Raises `InvalidReference`."""
        return str(Reference.parse(text))

    async def search(self, query: str, format: ModelFormat, limit: int) -> Sequence[wire.Offer]:
        """Returns at most `limit` models that the source offers; none if it cannot be searched. Raises
        `SourceFailed`."""
        return ()

    async def preview(self, text: str, folder: Path, token: str | None) -> Preview:
        """Returns a description of the model that `fetch` would bring, without the fetch; `folder` is empty and
        temporary. Raises the errors of `fetch`, and `BadRequest` for a source that cannot tell."""
        raise BadRequest(f"the source of {text} describes no model before it is pulled: pull it first", param="model")


def make_way(folder: Path, name: str) -> Path:
    """Returns the path for the file `name` in `folder`. Afterwards no file is there, and the folder at the beginning of
    the name exists."""
    target = folder / name
    if target.parent != folder:
        if target.parent.is_symlink():
            discard(target.parent)
        target.parent.mkdir(mode=0o700, exist_ok=True)
    discard(target)
    return target
