"""Runs safetensors models with vLLM."""

from modelrunner_vllm.backend import VllmBackend

__all__ = ["VllmBackend"]
