"""What the requests under way have in common: their bytes, their number, and who hears of their end."""

from modelrunner.errors import LengthRequired, PayloadTooLarge, Unavailable
from modelrunner.gateway.request.observers import Observers
from modelrunner.gateway.request.quarantine import Quarantine
from modelrunner.gateway.request.work import UnderWay
from modelrunner.gateway.uploads import RequestUpload
from modelrunner.http.limits import Limits


class InFlight:
    """The requests under way."""

    def __init__(self, limits: Limits, *, tracing: bool = False) -> None:
        self.limits = limits
        self.tracing = tracing
        """True if each request gets a trace."""
        self.running: set[UnderWay] = set()
        """Each is here from its start to its end."""
        self.buffered = 0
        """The bytes of their bodies, and of those that still come."""
        self.observers = Observers()
        """They hear of every request."""
        self.quarantine = Quarantine()

    def buffer(self, size: int, whole: int) -> None:
        """Counts `size` more bytes of a body with at least `whole` bytes. Raises `LengthRequired` for a negative
        length, `PayloadTooLarge`, and `Unavailable` if all bodies together are too large."""
        if whole < 0:
            raise LengthRequired("the request has no body: send it with a Content-Length")
        if whole > self.limits.body:
            raise PayloadTooLarge(f"the body has {whole} bytes; body_limit allows {self.limits.body}")
        if self.buffered + size > self.limits.total_body:
            raise Unavailable("the requests under way have too many bytes together; try again later")
        self.buffered += size

    def unbuffer(self, size: int) -> None:
        """Subtracts bytes that are not kept any more."""
        self.buffered -= size

    def drop(self, body: bytes | RequestUpload) -> None:
        """Frees a body that is not needed any more."""
        self.buffered -= len(body)
        if isinstance(body, RequestUpload):
            body.close()

    def end(self, work: UnderWay, *, is_told: bool) -> None:
        """Called once when a request is over: frees its body, and tells the allowances that count it and the
        observers, unless none `is_told`."""
        ask = work.ask
        self.running.discard(work)
        self.drop(ask.body if ask.upload is None else ask.upload)
        if not is_told:
            return
        record = work.record()
        for allowance in ask.counted:
            tokens = record.tokens
            allowance.end(tokens.prompt + tokens.answer, len(ask.body), ask.arrived + record.duration)
        if self.observers.active:
            self.observers.tell(record)
