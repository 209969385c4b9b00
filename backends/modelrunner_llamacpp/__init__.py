"""Runs GGUF models with llama.cpp."""

from modelrunner_llamacpp.backend import LlamaCppBackend

__all__ = ["LlamaCppBackend", "Name"]

Name = LlamaCppBackend.name
