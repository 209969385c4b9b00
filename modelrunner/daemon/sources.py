"""The sources that models come from, in the order in which they are asked whether a text is theirs."""

from modelrunner.models.quantizing import QuantizeTool
from modelrunner.oci.credentials import Credentials
from modelrunner.oci.registries import Registries
from modelrunner.pull.address import AddressSource
from modelrunner.pull.file import FileSource, ImportSource, StoredSource
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.pull.modelscope import ModelScopeSource
from modelrunner.pull.ociregistry import RegistrySource
from modelrunner.pull.pypi import PypiSource
from modelrunner.pull.quantized import QuantizedSource
from modelrunner.pull.source import Source
from modelrunner.pull.uploads import Uploads, UploadSource
from modelrunner.store import Store


def sources_of(
    store: Store, registries: Registries, credentials: Credentials, uploads: Uploads, quantize: QuantizeTool
) -> tuple[Source, ...]:
    """Returns every source of the daemon."""
    return (
        PypiSource(),
        HuggingFaceSource(),
        ModelScopeSource(),
        AddressSource(),
        FileSource(),
        StoredSource(store),
        ImportSource(),
        QuantizedSource(store, quantize),
        RegistrySource(registries, credentials),
        UploadSource(store, uploads),
    )
