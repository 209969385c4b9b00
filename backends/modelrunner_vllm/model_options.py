"""The table `vllm` of a model's configuration: settings for vLLM alone. No setting can name code, a file outside the
folders that the command line trusts, or another repository."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from modelrunner_vllm.model import REASONING_PARSERS, TOOL_PARSERS

_MOST_TOKENS = 1 << 24
ClassName = Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9_]{0,95}$")]
Tokens = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
Factor = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]

Quantization = Literal[
    "awq",
    "awq_marlin",
    "auto_awq",
    "gptq",
    "gptq_marlin",
    "auto_gptq",
    "compressed-tensors",
    "fp8",
    "mxfp4",
    "modelopt",
    "modelopt_fp4",
    "quark",
    "moe_wna16",
    "torchao",
    "experts_int8",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "mxfp8",
]


def _one_of(known: frozenset[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known | {"none"}:
            raise ValueError(f"one of none, {', '.join(sorted(known))}")
        return name

    return AfterValidator(check)


class RopeParameters(BaseModel):
    """The values of `rope_parameters` (`rope_scaling`) in config.json: the encoding of positions beyond the trained
    ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
    rope_theta: Factor | None = None
    factor: Factor | None = None
    original_max_position_embeddings: Tokens | None = None
    attention_factor: Factor | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None


class HfOverrides(BaseModel):
    """The values of config.json that may be replaced, by their names there: numbers, words of a closed list and names
    of vLLM's own classes. Keys with code or files (`auto_map`, `_name_or_path`) are not among them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architectures: Annotated[tuple[ClassName, ...], Field(min_length=1, max_length=1)] | None = None
    max_position_embeddings: Tokens | None = None
    model_max_length: Tokens | None = None
    sliding_window: Tokens | None = None
    rope_theta: Factor | None = None
    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeParameters | None = None
    num_experts_per_tok: Annotated[int, Field(ge=1, le=1024)] | None = None
    is_causal: bool | None = None
    num_labels: Annotated[int, Field(ge=1, le=65536)] | None = None
    classifier_from_token: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=16)] | None = (
        None
    )
    is_original_qwen3_reranker: bool | None = None

    def values(self) -> dict[str, Any]:
        """Returns the values in vLLM's form."""
        return self.model_dump(mode="json", exclude_none=True)


class VllmOptions(BaseModel):
    """The settings are all optional. Their keys are written with dashes, as in the API of docker/model-runner;
    underscores are accepted, too.

    - `dtype` is the type of weights that are not quantized, and of activations; `kv-cache-dtype` is the cache's.
      `quantization` is needed only if the model's own config.json does not say it.
    - `gpu-memory-utilization` is the share of each GPU, from 0 to 1, that vLLM may use for everything. Without it the
      cache is as large as the context and the parallel sequences take, or has the bytes of `kv-cache-size`.
    - `enforce-eager` is true for no compilation, and false for torch.compile and CUDA graphs. By default only a GPU
      compiles.
    - `devices` are the numbers of the GPUs that may be used, as `nvidia-smi` counts them. Without it they are all.
    - `tensor-parallel-size`, `pipeline-parallel-size`, `executor` and `ray-address` say how many devices and machines
      one runner takes. With the executor ray the daemon places the workers on hosts of its cluster; with an address,
      Ray does on those of another.
    - `tool-call-parser` and `reasoning-parser` are "none" or one of vLLM's names. By default the architecture decides.
    - `sleep` releases memory of an idle engine before it is stopped (CUDA). 1 moves the weights to main memory, 2 drops
      them; both drop the cache.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=lambda name: name.replace("_", "-"),
        validate_by_name=True,
        validate_by_alias=True,
    )

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    quantization: Quantization | None = None
    hf_overrides: HfOverrides | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    kv_cache_size: Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None = None
    enforce_eager: bool | None = None
    devices: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = ()
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    executor: Literal["mp", "ray", "uni"] | None = None
    ray_address: Annotated[str, Field(pattern=r"^(auto|(ray://)?[A-Za-z0-9.\-\[\]:]{1,253}:\d{1,5})$")] | None = None
    tool_call_parser: Annotated[str, _one_of(TOOL_PARSERS)] | None = None
    reasoning_parser: Annotated[str, _one_of(REASONING_PARSERS)] | None = None
    sleep: Literal[1, 2] | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Converts `RunSpec.options`."""
        return cls.model_validate(dict(options))

    @property
    def workers(self) -> int:
        """Returns the number of processes that share the model, one for each device."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.ray_address is not None and self.executor != "ray":
            raise ValueError("ray-address needs executor ray")
        if self.gpu_memory_utilization is not None and self.kv_cache_size is not None:
            raise ValueError("gpu-memory-utilization and kv-cache-size exclude each other")
        if len(set(self.devices)) != len(self.devices):
            raise ValueError("devices names one twice")
        if self.devices and len(self.devices) < self.workers:
            raise ValueError(f"devices names {len(self.devices)}, and {self.workers} workers need one each")
        return self
