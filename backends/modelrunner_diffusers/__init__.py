"""Draws pictures, with diffusion models as diffusers keeps them."""

from modelrunner_diffusers.backend import DiffusersBackend

__all__ = ["DiffusersBackend", "Name"]

Name = DiffusersBackend.name
