"""The models that a request may name: those that its API key allows."""

from collections.abc import Iterable, Mapping

from aiohttp import web

from modelrunner.api.documented import check_local
from modelrunner.api.middleware import key_of
from modelrunner.errors import Forbidden, ModelNotFound
from modelrunner.keys.ring import KeyHolder
from modelrunner.models.library import Library
from modelrunner.models.orders import PullOrder
from modelrunner.store import Reference, StoredModel

FILE_IS_PACKAGED = "a file of this machine is packaged"
"""Why the source in an order is `local`."""


class Reach:
    """Every route that names a model asks here first. What a key of some models may not use, it neither sees nor
    changes; everybody else may name everything."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def check(self, request: web.Request, reference: str) -> None:
        """Raises `Forbidden` unless the key allows one of the names that the model is known by, or would get by a pull;
        `InvalidReference`."""
        if (key := _limited(request)) is not None:
            key.check_model(*self._library.names(reference))

    def check_names(self, request: web.Request, *names: str) -> None:
        """For names that are given to a model or taken from it. Raises `Forbidden` unless the key allows each of them;
        `InvalidReference`."""
        if (key := _limited(request)) is not None:
            for name in names:
                key.check_model(Reference.parse(name).short)

    def check_order(self, request: web.Request, order: PullOrder, field: str = "") -> None:
        """As both of them, for the source of a pull and the name that it gives. A source that is a file of this machine
        needs the Unix socket: `field` has the source in the request, and is declared `local`."""
        is_file = self._library.is_local(order)
        if is_file and not order.is_sent:
            check_local(request, field)
        if _limited(request) is None:
            return
        if not is_file:
            self.check(request, order.source)
        self.check_names(request, order.name or self._library.pull_name(order.source))

    async def has_file(self, request: web.Request, digest: str) -> bool:
        """Whether the client may make a model of the file with this digest without sending it: a digest alone gives no
        key the file of a model that it may not use. Raises `InvalidReference`."""
        if (key := _limited(request)) is None:
            return await self._library.has_file(digest)
        return await self._library.may_take_file(digest, key.allows)

    async def check_files(self, request: web.Request, files: Mapping[str, str]) -> None:
        """For the files, by their names, that a model is made of. Raises `ModelNotFound`, `InvalidReference`."""
        for name, digest in files.items():
            if _limited(request) is not None and not await self.has_file(request, digest):
                raise ModelNotFound(f"the file {name!r} ({digest}) is not here: send it first", param="files")

    def check_removal(self, request: web.Request, reference: str) -> None:
        """As `check`, and as `check_names` for each name that goes. Raises `ModelNotFound`, too."""
        if _limited(request) is not None:
            self.check(request, reference)
            self.check_names(request, *self._library.names_removed(reference))

    def check_all(self, request: web.Request) -> None:
        """For what concerns models that the request does not name. Raises `Forbidden` for a key of some models."""
        if (key := _limited(request)) is not None:
            raise Forbidden(
                f"the key {key.key.name} may not use what concerns other models too; it may use "
                f"{', '.join(key.key.models)}"
            )

    def allows(self, request: web.Request, *names: str) -> bool:
        """Whether a model of these names may be shown."""
        return (key := _limited(request)) is None or key.allows(*names)

    def shown(self, request: web.Request, models: Iterable[StoredModel]) -> list[StoredModel]:
        """Those that may be shown."""
        return [model for model in models if self.allows(request, model.name, *model.tags)]


def _limited(request: web.Request) -> KeyHolder | None:
    """The key of the request if it is one of some models."""
    key = key_of(request)
    return key if key is not None and key.key.models else None
