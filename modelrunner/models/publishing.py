"""Models where they are published: shows one before it is pulled, and pushes one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelrunner.defaults import ModelDefaults
from modelrunner.oci.push import Pusher
from modelrunner.progress import ProgressReport
from modelrunner.pull import Puller
from modelrunner.scheduler import Scheduler
from modelrunner.store import gguf_model
from modelrunner.store.describe import TEMPLATES
from modelrunner.store.details import ModelDetails
from modelrunner.store.manifests import DEFAULTS
from modelrunner.units import format_bytes


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """`name` is the name that a pull would give it, `version` a commit, branch or digest at its source. `config` is
    that of a stored model as far as it is known; `files` are sizes in bytes by the names at the source."""

    name: str
    version: str
    config: Mapping[str, Any]
    details: ModelDetails
    files: Mapping[str, int]
    capabilities: frozenset[str]


class RemoteModels:
    def __init__(self, puller: Puller) -> None:
        self._puller = puller

    async def get(self, text: str) -> RemoteModel:
        """Asks the source of the model `text`. Raises as `Puller.preview`."""
        name, preview = self._puller.name(text).short, await self._puller.preview(text)
        config: dict[str, Any] = {"size": format_bytes(preview.size)}
        config |= {"format": preview.format} if preview.format else {}
        config |= {key: value for key, value in preview.config.items() if key != DEFAULTS}
        template, capabilities, licences = preview.template, frozenset[str](), preview.licences
        if (bundle := preview.bundle) is not None:
            config |= gguf_model.configuration(bundle.header, bundle.header.tensors, preview.size)
            template = template or str(bundle.header.metadata.get(TEMPLATES, ""))
            licences = licences or tuple(filter(None, [str(bundle.header.metadata.get("general.license", ""))]))
            capabilities = bundle.capabilities
        carried = ModelDefaults.parse(preview.config[DEFAULTS]) if DEFAULTS in preview.config else None
        details = ModelDetails(template, licences, carried)
        return RemoteModel(name, preview.version, config, details, preview.files, capabilities)


class Publisher:
    def __init__(self, pusher: Pusher, scheduler: Scheduler) -> None:
        self._pusher = pusher
        self._scheduler = scheduler

    async def push(
        self,
        reference: str,
        target: str | None,
        report: ProgressReport,
        *,
        token: str | None = None,
        key: Path | None = None,
    ) -> str:
        """Pushes a model, and returns its name at the registry with the digest. `report` is called from the event
        loop's thread. Raises as `Pusher.push`."""
        pushed = await self._pusher.push(reference, target, report, token=token, key=key)
        self._scheduler.events.emit("push", model=reference, reason=f"pushed to {pushed}")
        return pushed
