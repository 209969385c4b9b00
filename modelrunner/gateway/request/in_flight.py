"""What the requests under way have in common: their bytes, their number, and who hears of their end."""

from modelrunner.errors import LengthRequired, PayloadTooLarge, Unavailable
from modelrunner.gateway.request.observers import Observers
from modelrunner.gateway.request.quarantine import Quarantine
from modelrunner.gateway.request.work import UnderWay
from modelrunner.gateway.uploads import RequestUpload
from modelrunner.http.limits import Limits

_UPLOADS_TOGETHER = 8
"""So many times `Limits.upload` may all uploads together have."""


class InFlight:
    """The requests under way."""

    def __init__(self, limits: Limits, *, tracing: bool = False) -> None:
        self.limits = limits
        self.tracing = tracing
        """True if each request gets a trace."""
        self.running: set[UnderWay] = set()
        """Each is here from its start to its end."""
        self.buffered = 0
        """The bytes in memory of their bodies, and of those that still come."""
        self.uploaded = 0
        """The bytes of those bodies that go through files when they are large."""
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

    def upload(self, size: int, whole: int, upload: RequestUpload) -> None:
        """Counts the next `size` bytes of an upload. Otherwise does as `buffer`."""
        if whole < 0:
            raise LengthRequired("the request has no body: send it with a Content-Length")
        if whole > self.limits.upload:
            raise PayloadTooLarge(f"the body has {whole} bytes; upload_limit allows {self.limits.upload}")
        held = upload.held(upload.size + size) - upload.held(upload.size)
        if (
            self.buffered + held > self.limits.total_body
            or self.uploaded + size > _UPLOADS_TOGETHER * self.limits.upload
        ):
            raise Unavailable("the requests under way have too many bytes together; try again later")
        self.buffered += held
        self.uploaded += size

    def unbuffer(self, size: int) -> None:
        """Subtracts bytes that are not kept any more."""
        self.buffered -= size

    def drop(self, body: bytes | RequestUpload) -> None:
        """Frees a body that is not needed any more."""
        if isinstance(body, RequestUpload):
            self.buffered -= body.held(body.size)
            self.uploaded -= body.size
            body.close()
        else:
            self.buffered -= len(body)

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
