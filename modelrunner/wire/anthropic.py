"""The structs of Anthropic's list of models: https://docs.claude.com/en/api/models-list"""

from datetime import datetime
from typing import Literal

import msgspec


class AnthropicModel(msgspec.Struct, frozen=True):
    """An entry of `GET /anthropic/v1/models`. `max_input_tokens` is the most tokens of one request, null if unknown."""

    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int | None
    lifecycle: Literal["active"] = "active"
    type: Literal["model"] = "model"


class AnthropicModels(msgspec.Struct, frozen=True):
    """`GET /anthropic/v1/models`: an entry for each name of each model, in one page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False
