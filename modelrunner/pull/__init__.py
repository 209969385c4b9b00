"""Where models come from."""

from modelrunner.pull.puller import Puller
from modelrunner.pull.source import Fetched, Report, Source

__all__ = ["Fetched", "Puller", "Report", "Source"]
