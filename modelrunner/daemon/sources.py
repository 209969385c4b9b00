"""The sources that models come from, in the order in which they are asked whether a text is theirs."""

from modelrunner.oci.credentials import Credentials
from modelrunner.oci.registries import Registries
from modelrunner.pull.address import AddressSource
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.pull.modelscope import ModelScopeSource
from modelrunner.pull.ociregistry import RegistrySource
from modelrunner.pull.pypi import PypiSource
from modelrunner.pull.source import Source


def sources_of(registries: Registries, credentials: Credentials) -> tuple[Source, ...]:
    """Returns every source of the daemon."""
    return (
        PypiSource(),
        HuggingFaceSource(),
        ModelScopeSource(),
        AddressSource(),
        RegistrySource(registries, credentials),
    )
