"""Runs safetensors models with vLLM."""

from modelrunner_vllm.backend import VllmBackend

__all__ = ["Name", "VllmBackend"]

Name = VllmBackend.name
