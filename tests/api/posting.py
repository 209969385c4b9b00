"""Posting a configuration that nobody has to judge."""

from collections.abc import Mapping
from typing import Any

from modelrunner.models.configurations import Configurations, PostedConfiguration
from modelrunner.types import Mode


async def configure(
    kept: Configurations, model_id: str, patch: Mapping[str, Any], mode: Mode | None = None
) -> PostedConfiguration:
    """As `Configurator.change` keeps it, with a new revision where the engine has to be started anew."""
    before = kept.settings.posted_for(model_id, mode)
    after = before.configuration.merged(patch)
    same = after.for_the_engine() == before.configuration.for_the_engine()
    posted = PostedConfiguration(before.revision if same else kept.take_revision(), after)
    await kept.keep(model_id, mode, before, posted)
    return posted
