"""Writes down what was said, with Whisper models in CTranslate2's format."""

from modelrunner_whisper.backend import WhisperBackend

__all__ = ["Name", "WhisperBackend"]

Name = WhisperBackend.name
