"""A local daemon that runs inference engines as supervised subprocesses behind one OpenAI-compatible endpoint.

docs/architecture.md says what lies where; `modelrunner.sdk` is what the author of a backend imports.
"""

__version__ = "0.1.0"
