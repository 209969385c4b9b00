"""Where models come from."""

from modelrunner.pull.puller import Pulled, Puller
from modelrunner.pull.source import Context, Fetched, FileProgress, Preview, Progress, Report, Source, Wanted

__all__ = [
    "Context",
    "Fetched",
    "FileProgress",
    "Preview",
    "Progress",
    "Pulled",
    "Puller",
    "Report",
    "Source",
    "Wanted",
]
