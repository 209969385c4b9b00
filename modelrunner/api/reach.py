"""Checks that a request names only models that its API key allows."""

from collections.abc import Iterable, Mapping

import msgspec
from aiohttp import web

from modelrunner import wire
from modelrunner.api.documented import check_local
from modelrunner.api.middleware import TRANSPORT
from modelrunner.errors import Forbidden, ModelNotFound
from modelrunner.keys.ring import KeyHolder
from modelrunner.models.abilities import Abilities, AbleModel
from modelrunner.models.library import Library
from modelrunner.models.orders import PullOrder
from modelrunner.scheduler import Fitting
from modelrunner.store import Reference, StoredModel

FILE_IS_PACKAGED = "a file of this machine is packaged"
"""Why the source in an order is `local`."""


class Reach:
    """Every route that names a model calls this first. A key that is limited to some models neither sees nor changes
    other models; all other callers may name every model."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def check(self, request: web.Request, reference: str) -> None:
        """Raises `Forbidden` unless the key allows one of the model's names, or the name that a pull would give it;
        `InvalidReference`."""
        if (key := _limited(request)) is not None:
            key.check_model(*self._library.names(reference))

    def check_names(self, request: web.Request, *names: str) -> None:
        """Checks names that a model gets or loses. Raises `Forbidden` unless the key allows each of them;
        `InvalidReference`."""
        if (key := _limited(request)) is not None:
            for name in names:
                key.check_model(Reference.parse(name).short)

    def check_order(self, request: web.Request, order: PullOrder, field: str = "") -> None:
        """Checks the source of a pull as `check`, and the name that it gives as `check_names`. A source that is a file
        of this machine needs the Unix socket: `field` of the request has the source, and is declared `local`."""
        if order.is_local:
            check_local(request, field)
        if _limited(request) is None:
            return
        if order.model is not None:
            self.check(request, order.model)
        self.check_names(request, order.name or self._library.pull_name(order.model or ""))

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
        """Checks the model as `check`, and as `check_names` the names that it loses. Raises `ModelNotFound`, too."""
        if _limited(request) is not None:
            self.check(request, reference)
            self.check_names(request, *self._library.names_removed(reference))

    def check_all(self, request: web.Request) -> None:
        """Checks a request that concerns all models. Raises `Forbidden` for a key that is limited to some."""
        if (key := _limited(request)) is not None:
            raise Forbidden(
                f"the key {key.key.name} may not use requests that concern other models too; it may use "
                f"{', '.join(key.key.models)}"
            )

    def allows(self, request: web.Request, *names: str) -> bool:
        """Returns whether the request may see a model with these names."""
        return (key := _limited(request)) is None or key.allows(*names)

    def of_fit(self, request: web.Request, fit: wire.Fit) -> wire.Fit:
        """Returns what the request may see of `fit`: not the names of other models that would make room."""
        if (key := _limited(request)) is None:
            return fit
        reason = "it fits once other models have made room" if fit.fits == Fitting.AFTER_EVICTION else fit.reason
        return msgspec.structs.replace(fit, would_evict=[*filter(key.allows, fit.would_evict)], reason=reason)

    async def listed(self, request: web.Request, models: Iterable[StoredModel]) -> list[AbleModel]:
        """Returns the models that the request may see, then those that engines manage themselves: of the backend in the
        path, or of all."""
        key, backend = _limited(request), request.match_info.get("backend")
        if key is None:
            return await self._library.listed([*models], backend)
        listed = await self._library.listed(self.shown(request, models), backend)
        return [(model, able) for model, able in listed if key.allows(model.name, *model.tags)]

    async def named(
        self, request: web.Request, models: Iterable[StoredModel], family: str
    ) -> list[tuple[str, StoredModel, Abilities]]:
        """As `listed`, with an entry for each name of a model and for each of its aliases in the API family, since
        clients choose by name."""
        listed = await self.listed(request, models)
        aliases = self._library.aliases.listed(listed, family)
        return [
            (name, model, able)
            for model, able in listed
            for name in [*(model.tags or [model.id]), *aliases.get(model.id, ())]
        ]

    def shown(self, request: web.Request, models: Iterable[StoredModel]) -> list[StoredModel]:
        """Returns the models that the request may see."""
        if _limited(request) is None:
            return [*models]
        return [model for model in models if self.allows(request, model.name, *model.tags)]


def _limited(request: web.Request) -> KeyHolder | None:
    """Returns the key of the request if it is limited to some models."""
    key = request[TRANSPORT].admitted.key
    return key if key is not None and key.key.models else None
