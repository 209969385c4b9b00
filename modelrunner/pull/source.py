"""What a source of models is, and what every source needs: a clear folder and room on the disk."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from modelrunner.defaults import ModelDefaults
from modelrunner.durable import discard
from modelrunner.errors import BadRequest
from modelrunner.progress import ProgressReport
from modelrunner.pull.reports import FoundModel
from modelrunner.store.references import Reference
from modelrunner.types import Bundle, ModelFormat
from modelrunner.web.download import Downloader
from modelrunner.web.partial import RemoteFile
from modelrunner.web.transfers import Transfers


@dataclass(frozen=True, slots=True)
class Making:
    """What a model is to carry beside its files: `template` is the text of a chat template in its own one's place, the
    licences are texts."""

    defaults: ModelDefaults | None = None
    template: str | None = None
    licences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PullSpec:
    """What a pull is to bring. `text` is as the caller wrote it, `origin` its normal form; `reference` is the name that
    the model gets. `token` goes to the source and nowhere else. `trust` takes a model that carries code. `verify` reads
    every byte of a model that is here already. `verify_key`, in PEM, must have signed it. `making` is for a model that
    gets a manifest of ours. `folder` is the one of the store's folders that it goes to."""

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
        """Pulls with the same key can be one download."""
        trusted = " trusted" if self.trust else ""
        text = f"{self.origin} {self.reference}{trusted} {self.verify_key or ''} {self.making or ''}"
        return f"{text} {self.folder or ''}".rstrip()


@dataclass(frozen=True, slots=True)
class PullResult:
    """A model that is in the store: its ID, and the name that this pull gave it. `cached`: it was there before."""

    id: str
    name: str
    cached: bool = False


@dataclass(frozen=True, slots=True)
class FromArchive:
    """Where a file of a model was unpacked from: the sha256 of the archive, and the file's name in it."""

    archive: str
    path: str


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The files of a model, complete. `files` maps the name inside the bundle (`model.gguf`, `config.json`) to the path
    that the source wrote or was given; `digests` holds the sha256 (64 hex digits) of those that the source vouches
    for. `stored` holds the sha256 of those that the store has already. `revision` is what `Source.revision`
    would have said, None where a source has no such thing; `version` is a commit, a digest or a version for people. A
    model that was published with a `manifest` keeps it; then
    the names mean nothing, and `unpacked` are those of the files that come from its archives."""

    files: Mapping[str, Path]
    digests: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None
    manifest: bytes | None = None
    unpacked: Mapping[str, FromArchive] = field(default_factory=dict)
    version: str = ""


@dataclass(frozen=True, slots=True)
class Preview:
    """What is known of a model before it is pulled: `size`, the bytes that a pull would download, and the `bundle` that
    would come of it, without its files, if the source lets a part of a file be read. `files` are the sizes by the names
    at the source, which may be hostile; `version` is that of `FetchResult`. `format` is "" where it is unknown;
    `config` holds what the source itself says under the names of `GET /models`. `template` is a chat template that is
    a file of its own; the licences are texts or their names."""

    size: int
    bundle: Bundle | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    version: str = ""
    format: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    template: str = ""
    licences: tuple[str, ...] = ()


class Context:
    """Where a source works for one pull: `folder` is its own and is kept for the next attempt; nothing in it is
    trusted. `report` takes its progress. `stored` returns the file that the store holds with a sha256 (64 hex digits),
    intact, or None. `transfers` are the limits of all downloads."""

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
        """Takes room in the quota for `files`, as `Claim.require`, until the pull is over."""

    def partial(self, file: RemoteFile) -> Path:
        """Where the file comes to lie, or has begun to."""
        return self.folder / file.partial_name

    async def fetch(self, file: RemoteFile, downloader: Downloader, advanced: Callable[[int], None]) -> Path | None:
        """Downloads the file and returns its path, None if the store has got it meanwhile. A file that has a sha256 is
        downloaded once at a time, whichever pulls want it. Raises as `Downloader.fetch`."""
        await downloader.fetch(file, self.partial(file), advanced, self.transfers)
        return self.partial(file)


class Source(ABC):
    """One kind of place that models come from. A source holds no state of a pull. `needs_name`: its texts are no
    references, so that the caller has to give one. `signs`: its models may have signatures."""

    needs_name: ClassVar[bool] = False
    signs: ClassVar[bool] = False

    @abstractmethod
    def claims(self, text: str) -> bool:
        """True if `text` is written in this source's way (`pypi:...`), even if it then turns out to be wrong."""

    def name(self, text: str) -> Reference:
        """The name that the model gets if the caller gives none. Raises `InvalidReference`."""
        return Reference.parse(text)

    def normal(self, text: str) -> str:
        """The normal form of `text`. Raises `InvalidReference`."""
        return text if self.needs_name else str(Reference.parse(text))

    @abstractmethod
    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        """Brings the files, going on with what an earlier attempt left in the folder. Code that a model carries is left
        where it is, unless `wanted.trust` is set. Cancelled, it returns only when nothing writes there any more. Raises
        `ModelNotFound`, `SourceFailed`, `InvalidModel`, `InsufficientDisk`, and `OSError` for the folder itself."""

    async def revision(self, wanted: PullSpec) -> str | None:
        """What the source has now, as a text that changes with it; cheap to ask. None: it cannot be said without
        fetching. Raises as `fetch`."""
        return None

    def must_ask(self, wanted: PullSpec) -> bool:
        """True if the source has to be asked about a model that is here, even if its digest is given: somebody must
        have signed it."""
        return wanted.verify_key is not None

    async def search(self, query: str, format: ModelFormat, limit: int) -> Sequence[FoundModel]:
        """At most `limit` models that it offers; none where it cannot be searched. Raises `SourceFailed`."""
        return ()

    async def preview(self, text: str, folder: Path, token: str | None) -> Preview:
        """What `fetch` would bring, learned without bringing it; `folder` is empty and temporary. Raises as `fetch`,
        and `BadRequest` for what is on this machine already, which not everybody may have read."""
        raise BadRequest(
            f"{text} is no model yet: `modelrunner package` makes one of it and gives it a name; then ask about that",
            param="model",
        )


def make_way(folder: Path, name: str) -> Path:
    """The path for the file `name` in `folder`. Afterwards nothing is there; the folder that the name may begin with
    exists."""
    target = folder / name
    if target.parent != folder:
        if target.parent.is_symlink():
            discard(target.parent)
        target.parent.mkdir(mode=0o700, exist_ok=True)
    discard(target)
    return target
