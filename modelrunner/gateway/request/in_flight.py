"""What the requests under way have in common: their bytes, their number, and who hears of their end."""

from modelrunner.errors import LengthRequired, PayloadTooLarge, Unavailable
from modelrunner.gateway.calls import client_of
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
        self._of_client: dict[str, int] = {}  # `buffered` of each client that has any
        self.observers = Observers()
        """They hear of every request."""
        self.quarantine = Quarantine()

    def buffer(self, client: str, size: int, whole: int) -> None:
        """Counts `size` more bytes of a body with at least `whole` bytes, of a `client` (`client_of`). One client has
        at most as much as is left for the others, but always room for one body. Raises `LengthRequired` for a negative
        length, `PayloadTooLarge`, and `Unavailable` if the client's bodies, or all together, are too large."""
        if whole < 0:
            raise LengthRequired("the request has no body: send it with a Content-Length")
        if whole > self.limits.body:
            raise PayloadTooLarge(f"the body has {whole} bytes; body_limit allows {self.limits.body}")
        self._count_within(client, size)

    def _count_within(self, client: str, size: int) -> None:
        limits, mine = self.limits, self._of_client.get(client, 0) + size
        left = limits.total_body - self.buffered - size
        if left < 0:
            raise Unavailable("the requests under way have too many bytes together; try again later")
        if mine > left and mine > limits.body:
            raise Unavailable("your requests under way have too many bytes together; wait for answers, then try again")
        self.buffered += size
        self._of_client[client] = mine

    def upload(self, client: str, size: int, whole: int, upload: RequestUpload) -> None:
        """Counts the next `size` bytes of an upload. Otherwise does as `buffer`."""
        if whole < 0:
            raise LengthRequired("the request has no body: send it with a Content-Length")
        if whole > self.limits.upload:
            raise PayloadTooLarge(f"the body has {whole} bytes; upload_limit allows {self.limits.upload}")
        held = upload.held(upload.size + size) - upload.held(upload.size)
        if self.uploaded + size > _UPLOADS_TOGETHER * self.limits.upload:
            raise Unavailable("the requests under way have too many bytes together; try again later")
        self._count_within(client, held)
        self.uploaded += size

    def count(self, client: str, size: int) -> None:
        """Counts bytes of the daemon's own making for a client, however many there are."""
        self.buffered += size
        self._of_client[client] = self._of_client.get(client, 0) + size

    def unbuffer(self, client: str, size: int) -> None:
        """Subtracts bytes that are not kept any more."""
        self.buffered -= size
        left = self._of_client.get(client, 0) - size
        if left > 0:
            self._of_client[client] = left
        else:
            self._of_client.pop(client, None)

    def drop(self, client: str, body: bytes | RequestUpload) -> None:
        """Frees a body that is not needed any more."""
        if isinstance(body, RequestUpload):
            self.unbuffer(client, body.held(body.size))
            self.uploaded -= body.size
            body.close()
        else:
            self.unbuffer(client, len(body))

    def end(self, work: UnderWay, *, is_told: bool) -> None:
        """Called once when a request is over: frees its body, and tells the allowances that count it and the
        observers, unless none `is_told`."""
        ask = work.ask
        self.running.discard(work)
        client = client_of(ask.head, ask.peer)
        if ask.upload is not None:
            self.drop(client, ask.upload)
        self.unbuffer(client, len(ask.body) + ask.held)
        if not is_told:
            return
        record = work.record()
        for allowance in ask.counted:
            tokens = record.tokens
            allowance.end(tokens.prompt + tokens.answer, len(ask.body), ask.arrived + record.duration)
        if self.observers.active:
            self.observers.tell(record)
