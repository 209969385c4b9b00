"""A real registry (Debian's docker-registry) on loopback, and what others would publish there."""

import contextlib
import hashlib
import json
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import reserved_port

PROGRAM = shutil.which("docker-registry")
OCI = "application/vnd.oci.image.manifest.v1+json"
# bcrypt of "secret".
HTPASSWD = "ada:$2b$05$/RLpF/m27XMr5YvT7kkza.65dSyHkn073vlmm7Yj/UK4aDkyBAGyO\n"


@dataclass(frozen=True, slots=True)
class Registry:
    """`host` is the name that references have; `log` what it says of its requests."""

    host: str
    url: str
    log: Path


@contextlib.contextmanager
def serving(folder: Path, *, users: str = "", tls: tuple[Path, Path] | None = None) -> Iterator[Registry]:
    """A registry with its files in `folder`; `users` are lines of htpasswd, `tls` a certificate and its key."""
    folder.mkdir(parents=True, exist_ok=True)
    with reserved_port() as port:
        config: dict[str, Any] = {
            "version": 0.1,
            "log": {"level": "warn", "accesslog": {"disabled": False}},
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}},
            "http": {"addr": f"127.0.0.1:{port}", "secret": "of these tests"},
        }
        if users:
            (folder / "htpasswd").write_text(users)
            config["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}
        if tls:
            config["http"]["tls"] = {"certificate": str(tls[0]), "key": str(tls[1])}
        (folder / "config.yml").write_text(json.dumps(config))
        assert PROGRAM is not None, "scripts/install-programs installs docker-registry"
        log = folder / "log"
        with open(log, "wb") as output:
            process = subprocess.Popen([PROGRAM, "serve", str(folder / "config.yml")], stdout=output, stderr=output)
        try:
            while True:
                with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert process.poll() is None, log.read_text()
            host = f"localhost:{port}" if tls else f"127.0.0.1:{port}"
            yield Registry(host, f"{'https' if tls else 'http'}://{host}", log)
        finally:
            process.terminate()
            process.wait()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(slots=True)
class Artifact:
    """A model as it is published: its manifest, byte for byte, and its blobs by digest."""

    manifest: bytes
    blobs: dict[str, bytes]
    media_type: str = OCI

    @property
    def id(self) -> str:
        return digest(self.manifest)


Layers = Sequence[tuple[str, bytes, Mapping[str, str]]]


def artifact(
    config: Mapping[str, Any], config_type: str, layers: Layers, *, artifact_type: str | None = None
) -> Artifact:
    """Laid out like the examples in the formats' documents."""
    data = json.dumps(config, separators=(",", ":")).encode()
    blobs = {digest(data): data}
    descriptors = []
    for media_type, content, annotations in layers:
        blobs[digest(content)] = content
        told = {"mediaType": media_type, "size": len(content), "digest": digest(content)}
        descriptors.append(told | ({"annotations": dict(annotations)} if annotations else {}))
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI,
        **({"artifactType": artifact_type} if artifact_type else {}),
        "config": {"mediaType": config_type, "size": len(data), "digest": digest(data)},
        "layers": descriptors,
    }
    return Artifact(json.dumps(manifest, indent=2).encode(), blobs)


def publish(registry: Registry, path: str, tag: str, model: Artifact) -> str:
    """Puts a model into the registry by its API. Returns its name."""
    for name, data in model.blobs.items():
        started = _call("POST", f"{registry.url}/v2/{path}/blobs/uploads/")
        place = started.headers["Location"]
        _call("PUT", f"{place}{'&' if '?' in place else '?'}digest={name}", data)
    _call("PUT", f"{registry.url}/v2/{path}/manifests/{tag}", model.manifest, model.media_type)
    return f"{registry.host}/{path}:{tag}"


def _call(method: str, url: str, data: bytes = b"", kind: str = "application/octet-stream") -> Any:
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": kind})
    with urllib.request.urlopen(request) as answer:
        answer.read()
        return answer
