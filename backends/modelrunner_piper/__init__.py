"""Speaks texts, with voices of Piper."""

from modelrunner_piper.backend import PiperBackend

__all__ = ["Name", "PiperBackend"]

Name = PiperBackend.name
