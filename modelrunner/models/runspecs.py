"""Makes the specification of a run from a model and its settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any

import msgspec

from modelrunner.backend import Backend, HasDefaults, TakesFlags, default_context_size
from modelrunner.config.modelconfig import NOTHING_SET, TRAINED, ModelConfiguration
from modelrunner.defaults import ModelDefaults
from modelrunner.engineapi import EngineApi
from modelrunner.errors import BadRequest, ModelNotFound
from modelrunner.models.backendtables import backend_options
from modelrunner.models.configurations import ModelSettings
from modelrunner.models.rendering import TemplateFiles
from modelrunner.models.tunings import Tunings
from modelrunner.plugins.isolation import interface_of
from modelrunner.store import Reference, Store, adapters, vocabulary
from modelrunner.store.references import how_to_get
from modelrunner.types import Bundle, Mode, RunSpec


class RunSpecs:
    """Makes them with the models of `store`, the chat templates of `templates`, and what was measured to be faster."""

    def __init__(self, store: Store, templates: TemplateFiles, tunings: Tunings | None = None) -> None:
        self._store = store
        self._templates = templates
        self._tunings = tunings or Tunings()
        self._drafting: set[tuple[str, str]] = set()  # IDs of models and drafts that have the same vocabulary

    def make(
        self, backend: Backend, bundle: Bundle, settings: ModelConfiguration, mode: Mode
    ) -> tuple[RunSpec, EngineApi]:
        """Makes the specification of a run, and the interface that its engine will have. The model is without the
        capabilities that the engine does not serve. It reads the files that the settings name. Raises `BadRequest`, and
        `ModelNotFound` for a draft model or an adapter that is not here."""
        speculative = settings.drafting if mode is Mode.COMPLETION else None
        template = settings.chat_template or None if mode is Mode.COMPLETION else None
        bundle = self._as_configured(bundle, template, settings.lora)
        if settings.template_arguments:
            carried = ModelDefaults(template_arguments=settings.template_arguments).over(bundle.defaults)
            bundle = replace(bundle, defaults=carried)
        if bundle.adapters and not backend.takes_adapters:
            raise BadRequest(
                f"{backend.name} applies no LoRA adapters: choose another backend for {bundle.name}, or take them back "
                f"with `modelrunner configure {bundle.name} --lora default`",
                param="lora",
            )
        draft = self._draft(bundle, speculative.draft_model) if speculative and speculative.draft_model else None
        context, least = _window(settings, backend, bundle)
        spec = RunSpec(
            model_id=bundle.model_id,
            bundle=bundle,
            mode=mode,
            context_size=context,
            parallel=settings.parallel or _parallel(backend, bundle, mode),
            flags=settings.runtime_flags or (),
            draft=draft,
            options=backend_options(backend, settings),
            gpu_layers=settings.gpu_layers,
            min_context_size=least,
            ngram=speculative is not None and speculative.ngram,
            mtp=speculative is not None and speculative.mtp,
            draft_tokens=speculative.num_tokens if speculative else None,
            draft_acceptance=speculative.min_acceptance_rate if speculative else None,
            template=template,
            lora=tuple(settings.lora) if settings.lora is not None else None,
            grows=settings.parallel is None and mode is Mode.COMPLETION,
        )
        spec = self._tunings.applied(backend, spec, settings)
        api = backend.api(spec)
        served = replace(bundle, capabilities=bundle.capabilities - api.lacks)
        return replace(spec, bundle=served), api

    def opened(self, values: bytes, bundle_of: Callable[[str], Bundle] | None = None) -> RunSpec:
        """Returns the run of another host, from its `values_of`, with the files that this host has: `bundle_of` the ID
        of a model, by default those of the store. Raises `BadRequest` for what are no values of a run, and
        `ModelNotFound` for a model, a draft or an adapter that is not here."""
        try:
            run: Any = msgspec.json.decode(values, type=_RunValues)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"this is no run: {error}") from None
        bundle_of = bundle_of or self._store.bundle
        draft = bundle_of(run.draft) if run.draft is not None else None
        bundle = self._as_configured(bundle_of(run.model_id), run.template, run.lora)
        served = replace(bundle, references=run.references, capabilities=run.capabilities)
        mine = {field: getattr(run, field) for field in _VALUES}
        return RunSpec(bundle=served, draft=draft, **mine)

    def _as_configured(self, bundle: Bundle, template: str | None, lora: Sequence[str] | None) -> Bundle:
        """Returns the bundle with the chat template and the LoRA adapters of the configuration in place of its own.
        Raises `BadRequest` for a template that its engine would render without end."""
        if template is not None:
            bundle = self._templates.applied(bundle, template)
        else:
            self._templates.renderings.require_ending(bundle)
            bundle = self._templates.renderings.narrowed(bundle)
        return adapters.applied(bundle, lora) if lora is not None else bundle

    def _draft(self, bundle: Bundle, name: str) -> Bundle:
        """Returns the model that has the name now, since a name may be given to another model at any time."""
        try:
            draft = self._store.bundle(name)
        except ModelNotFound:
            raise ModelNotFound(
                f"the draft model {name} is not here: {how_to_get(Reference.parse(name))}; or do without it with "
                f"`modelrunner configure {bundle.name} --draft-model default`",
                param="speculative.draft_model",
            ) from None
        pair = bundle.model_id, draft.model_id
        if pair not in self._drafting:
            if difference := vocabulary.difference(bundle, draft):
                raise BadRequest(
                    f"{draft.name} cannot draft for {bundle.name}: {difference}; take a smaller model of the same "
                    "family",
                    param="speculative.draft_model",
                )
            self._drafting.add(pair)
        return draft


_VALUES = {field.name: field.type for field in fields(RunSpec) if field.name not in ("bundle", "draft")}
_OF_BUNDLES = {"draft": str | None, "references": tuple[str, ...], "capabilities": frozenset[str]}
_RunValues = msgspec.defstruct("_RunValues", [*_VALUES.items(), *_OF_BUNDLES.items()], frozen=True)


def values_of(spec: RunSpec) -> bytes:
    """Returns what another host needs to make the same run (`RunSpecs.opened`): JSON without a path of this host, but
    for adapters that the configuration names by one."""
    bundle, draft = spec.bundle, spec.draft.model_id if spec.draft is not None else None
    mine = {field: getattr(spec, field) for field in _VALUES}
    return msgspec.json.encode(
        {**mine, "draft": draft, "references": bundle.references, "capabilities": bundle.capabilities}
    )


def revision_of(spec: RunSpec, api: EngineApi) -> int:
    """Returns `RunnerKey.revision`: a hash of all that the engine is started with beside the files. An engine that
    checks the names of its model knows those of one model alone."""
    own = "" if api.model_name or not api.checks_model else spec.model_id
    parts = {field: getattr(spec, field) for field in _VALUES}
    parts |= {"model_id": own, "draft": spec.draft.files_id if spec.draft is not None else None}
    parts["adapters"] = [(each.name, each.scale, each.size) for each in spec.bundle.adapters]
    return int.from_bytes(blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=7).digest(), "big")


def in_effect(backend: Backend, settings: ModelSettings, model_id: str, mode: Mode) -> ModelConfiguration:
    """Returns the model's settings, with the runtime flags of the configuration file folded into its fields. Raises
    `BadRequest` as `folded`."""
    file = NOTHING_SET.merged(folded(backend, settings.from_file(model_id).as_dict()))
    return settings.effective(model_id, mode).configuration.over(file)


def _window(settings: ModelConfiguration, backend: Backend, bundle: Bundle) -> tuple[int, int | None]:
    """Returns the context, and the least one that may run where memory is short. One that nobody chose may shrink to
    the one of an engine without figures of its own."""
    least, chosen = settings.min_context_size, settings.context_size
    if chosen is None and bundle.defaults:
        chosen = bundle.defaults.context_size
    if chosen == TRAINED and bundle.context_length is not None:
        return bundle.context_length, least
    if chosen is not None and chosen != TRAINED:
        return chosen, least
    defaults, usual = interface_of(backend, HasDefaults), default_context_size(bundle)
    context = defaults.default_context_size(bundle) if defaults else usual
    return context, least or min(context, usual)


def _parallel(backend: Backend, bundle: Bundle, mode: Mode) -> int:
    defaults = interface_of(backend, HasDefaults)
    return defaults.default_parallel(bundle, mode) if defaults else 1


def folded(backend: Backend, patch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Moves runtime flags that have a field of their own (`--ctx-size`) into that field of the merge patch, so that the
    fields that are shown and counted are those that run. Raises `BadRequest` for a flag that is not allowed or
    contradicts its field."""
    flags = interface_of(backend, TakesFlags)
    if not patch.get("runtime-flags") or flags is None:
        return patch
    known, rest = flags.fold_flags(tuple(patch["runtime-flags"]))
    fields = {name.replace("_", "-"): value for name, value in known.items()}
    for name, value in fields.items():
        if patch.get(name) not in (None, value):
            raise BadRequest(
                f"{name} is {patch[name]}, and a runtime flag says {value}: leave one of them out", param=name
            )
    return {**patch, **fields, "runtime-flags": list(rest) or None}
