"""Decides whether requests are traced."""

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelrunner.telemetry.traces import Traces

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def traces(environ: Mapping[str, str]) -> "Traces | None":
    """Returns the observer that the variables OTEL_* ask for, None if they ask for none. Logs a warning if the extra is
    missing."""
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if off or not any(map(environ.get, _ENDPOINTS)):
        return None
    if not find_spec("opentelemetry") or not find_spec("opentelemetry.exporter"):
        log.warning("no traces: OTEL_* asks for them; install the extra with `pip install 'modelrunner[otel]'`")
        return None
    from modelrunner.telemetry.traces import Traces

    return Traces(environ)
