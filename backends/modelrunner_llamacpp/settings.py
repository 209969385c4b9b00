"""The table `[backends."llama.cpp"]` of the configuration."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from modelrunner.sdk import BadRequest
from modelrunner.units import parse_bytes


def _size(value: Any) -> int:
    try:
        return parse_bytes(value)
    except BadRequest as error:
        raise ValueError(error.message) from None  # for pydantic, which knows the key


Size = Annotated[int, BeforeValidator(_size)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Server = Annotated[str, Field(pattern=r"^[0-9A-Za-z.-]{1,253}:[0-9]{1,5}$")]


class LlamaCppSettings(BaseModel):
    """The settings are all optional.

    - `llama_server` is used before every other engine.
    - `python` is an interpreter that can import llama-cpp-python's server. The default is our own.
    - `version` is a version of the wheel (xllamacpp) other than the one that this release installs.
    - `wheel_index` is an index to take the wheel from instead of the user's own, such as the one of its CUDA builds.
    - `wheel_sha256` are the digests of the files that may be installed. `version` needs them. Without them
      `wheel_index` is trusted.
    - `prompt_cache` is the bytes of main memory for prompts of finished requests (`--cache-ram`), 0 for none.
    - `slot_cache` is the bytes on disk for the prompt caches of unloaded models, 0 for none. A prompt of fewer than
      `slot_tokens` tokens is not kept there.
    - `rpc` are the addresses (HOST:PORT) of `ggml-rpc-server`s whose devices are used, too (rpc.py).
    - `threads` is the number of an engine's CPU threads. By default llama.cpp chooses it, but no more than this process
      may use.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    llama_server: Path | None = None
    python: Path | None = None
    version: Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+-]{0,63}$")] | None = None
    wheel_index: str | None = None
    wheel_sha256: tuple[Sha256, ...] = ()
    prompt_cache: Size = 0
    slot_cache: Size = 4 << 30
    slot_tokens: int = Field(default=32, ge=1)
    rpc: Annotated[tuple[Server, ...], Field(max_length=16)] = ()  # GGML_RPC_MAX_SERVERS
    threads: int | None = Field(default=None, ge=1, le=1024)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.version is not None and not (self.wheel_sha256 or self.wheel_index):
            raise ValueError("version needs wheel_sha256, the SHA-256 of the file of that version for this platform")
        return self
