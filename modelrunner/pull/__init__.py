"""The sources of models, and pulls from them into the store."""

from modelrunner.pull.puller import Puller
from modelrunner.pull.source import Context, FetchResult, Preview, PullResult, PullSpec, Source
from modelrunner.web.transfers import Transfers

__all__ = [
    "Context",
    "FetchResult",
    "Preview",
    "PullResult",
    "PullSpec",
    "Puller",
    "Source",
    "Transfers",
]
