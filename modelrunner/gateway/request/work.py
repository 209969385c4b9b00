"""The interfaces of the work on a request."""

from typing import Protocol

from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.calls import BackgroundWork, Inference, Sink
from modelrunner.gateway.request.observers import RequestRecord


class UnderWay(BackgroundWork, Protocol):
    """A request between its admission and the end of its answer."""

    ask: Inference

    def pause(self) -> None:
        """Called when the client reads no more for now. Safe to call again."""

    def resume(self) -> None: ...

    def stop(self, error: ModelRunnerError) -> None:
        """Ends the request with an error, whatever it is doing."""

    def record(self) -> RequestRecord:
        """Returns the record of the request so far."""


class RecordingTap(Sink, UnderWay, Protocol):
    """Stands between the `work` on a request and the client, and records both bodies."""

    work: UnderWay


class Recorder(Protocol):
    def tap(self, ask: Inference, sink: Sink) -> RecordingTap:
        """Returns a tap for a request to a model that is recorded, or not known yet. Raises nothing."""


class Interceptor(Protocol):
    """Another way to an answer than an exchange of the request's own."""

    def take(self, ask: Inference, sink: Sink) -> UnderWay | None:
        """Returns the work on a request; None for a request that gets an exchange. Raises nothing."""
