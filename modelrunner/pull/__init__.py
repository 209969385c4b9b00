"""Where models come from."""

from modelrunner.pull.puller import Pulled, Puller
from modelrunner.pull.source import Context, Fetched, Preview, Source, Wanted

__all__ = [
    "Context",
    "Fetched",
    "Preview",
    "Pulled",
    "Puller",
    "Source",
    "Wanted",
]
