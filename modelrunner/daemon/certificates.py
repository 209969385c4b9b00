"""The certificate of the TCP listener: given or made here, and read again when its files change."""

import asyncio
import hashlib
import ipaddress
import logging
import os
import socket
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from modelrunner.concurrency.beat import beat
from modelrunner.config.locations import ConfigurationError

if TYPE_CHECKING:
    from cryptography.x509 import GeneralName

log = logging.getLogger(__name__)

_LOOK = 1.0  # seconds between two looks at the files
_VALID = timedelta(days=3650)
_LATE = timedelta(days=30)  # before its end a certificate of ours is replaced


class Certificate:
    """`context` has the files' newest usable state; `fingerprint` is the SHA-256 of the certificate, in hex."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises `ConfigurationError` for files that cannot be used."""
        self._files = (certificate, key)
        try:
            self._seen = self._stamps()
            self.context, self.fingerprint = self._load()
        except (OSError, ValueError) as error:  # `SSLError` is an OSError
            raise ConfigurationError(f"TLS with {certificate} and {key} cannot be used: {error}") from error

    def current(self) -> ssl.SSLContext:
        return self.context

    async def watch(self) -> None:
        """Reads changed files. New connections get the new certificate; files that cannot be used change nothing."""
        while True:
            await beat(_LOOK)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        try:
            if (stamps := self._stamps()) == self._seen:
                return
            self._seen = stamps
            self.context, self.fingerprint = self._load()
        except (OSError, ValueError) as error:
            log.error("the TLS certificate stays as it was: %s", error)
        else:
            log.info("the TLS certificate was read again; its SHA-256 fingerprint is %s", self.fingerprint)

    def _stamps(self) -> list[tuple[int, int, int]]:
        stamps = [file.stat() for file in self._files]
        return [(stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in stamps]

    def _load(self) -> tuple[ssl.SSLContext, str]:
        certificate, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(certificate, key, password="")  # a key with a password is an error, and no prompt
        first, _, _ = certificate.read_text("ascii").partition("-----END CERTIFICATE-----")
        _, begin, rest = first.partition("-----BEGIN CERTIFICATE-----")
        der = ssl.PEM_cert_to_DER_cert(f"{begin}{rest}-----END CERTIFICATE-----")
        return context, hashlib.sha256(der).hexdigest()


def self_signed(folder: Path, names: Iterable[str]) -> Certificate:
    """Returns the certificate in `folder`, which is made for ten years where there is none, or one that ends soon. Its
    `names` are host names and addresses. Raises `ConfigurationError`, `OSError`."""
    file, key = folder / "certificate.pem", folder / "key.pem"
    if not _lasts(file):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make(file, key, [socket.gethostname(), "localhost", "127.0.0.1", "::1", *names])
    return Certificate(file, key)


def _lasts(file: Path) -> bool:
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError):
        return False
    return certificate.not_valid_after_utc > datetime.now(UTC) + _LATE


def _make(file: Path, key: Path, names: list[str]) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "modelrunner")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _VALID)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(one) for one in dict.fromkeys(names)]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    text = private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for path, data in ((key, text), (file, certificate.public_bytes(pem))):
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
            out.write(data)


def _general_name(name: str) -> "GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
