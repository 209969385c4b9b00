"""The local model store: what is on disk, what it is called, and how an engine gets to open it."""

from modelrunner.store.blobs import Blob
from modelrunner.store.catalog import StoredModel
from modelrunner.store.digests import Digest
from modelrunner.store.diskusage import ModelSize, StoreUsage
from modelrunner.store.references import Reference
from modelrunner.store.store import RemoveResult, Store
from modelrunner.store.sweeping import Leftover

__all__ = ["Blob", "Digest", "Leftover", "ModelSize", "Reference", "RemoveResult", "Store", "StoreUsage", "StoredModel"]
