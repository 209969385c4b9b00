"""A pull from a registry on loopback against curl piped into sha256sum and against skopeo: all write to the same disk,
and are over when their files are synced.

    scripts/bench pull [--size BYTES] [--rounds N] [--folder DIR]

Each round runs all of them, one after the other, another one first. Ours is a process of its own with a new store: its
time includes Python's start, and that the model is verified, stored, laid out and its header read. Needs
docker-registry, skopeo and curl (scripts/setup-ci)."""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.oci.registry import serving

WAYS = ("curl | sha256sum", "skopeo copy", "modelrunner")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--size", type=int, default=1_000_000_000, help="bytes of the model")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write: on the disk that is measured")
    options.add_argument("--pull", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.pull:
        asyncio.run(pull(given.pull[0], Path(given.pull[1])))
        return
    with tempfile.TemporaryDirectory(prefix="bench-pull-", dir=given.folder) as folder:
        measure(Path(folder), given.size, given.rounds)


def measure(folder: Path, size: int, rounds: int) -> None:
    with serving(folder / "registry") as registry:
        path, blob = "bench/model", publish(folder, registry.url, size)
        name, url = f"{registry.host}/bench/model:latest", f"{registry.url}/v2/{path}/blobs/{blob}"
        best: dict[str, float] = {}
        peak = 0
        for turn in range(rounds):
            for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                target = folder / "target"
                target.mkdir()
                os.sync()
                began, used = time.perf_counter(), processor_seconds()
                if way == "modelrunner":
                    peak = max(peak, run_pull(name, target))
                elif way == "skopeo copy":
                    command = ["skopeo", "--insecure-policy", "copy", "--quiet", "--src-tls-verify=false"]
                    subprocess.run([*command, f"docker://{name}", f"dir:{target / 'skopeo'}"], check=True)
                    sync(target)
                else:
                    line = f"set -o pipefail; curl -sf {url} | tee {target / 'blob'} | sha256sum"
                    found = subprocess.run(["bash", "-c", line], check=True, capture_output=True, text=True).stdout
                    assert found.split()[0] == blob.removeprefix("sha256:")
                    sync(target)
                took, used = time.perf_counter() - began, processor_seconds() - used
                best[way] = min(best.get(way, took), took)
                rate = f"{took:6.2f} s {size / took / 1e6:6.0f} MB/s {used:6.2f} s of processor"
                print(f"  round {turn + 1}: {way:17} {rate}", flush=True)
                shutil.rmtree(target)
    fastest = min(best.values())
    print("\nbest of each, and its share of the fastest's rate:")
    for way, took in best.items():
        print(f"  {way:17} {took:6.2f} s  {fastest / took:.2f}")
    print(f"peak memory of the pull: {peak / 1e6:.0f} MB")


def processor_seconds() -> float:
    """Of the programs that have ended, so without the registry: a busy machine changes it less than the time."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def sync(folder: Path) -> None:
    """The files, and the folder that names them, as the store syncs its own."""
    for place in (*(file for file in folder.rglob("*") if file.is_file()), folder):
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def run_pull(name: str, folder: Path) -> int:
    """Returns the peak of memory in bytes."""
    command = [sys.executable, __file__, "--pull", name, str(folder)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."})
    return int(result.stdout)


async def pull(name: str, folder: Path) -> None:
    from modelrunner.oci.credentials import Credentials
    from modelrunner.oci.registries import Registries
    from modelrunner.pull import Puller
    from modelrunner.pull.ociregistry import RegistrySource
    from modelrunner.store import Store

    source = RegistrySource(Registries(), Credentials(folder / "logins.json"))
    await Puller(Store(folder / "data"), [source]).pull(name, lambda line: None)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def publish(folder: Path, url: str, size: int) -> str:
    """Puts a model of one GGUF file of random bytes into the registry. Returns the file's digest."""
    model, sha256 = folder / "model", hashlib.sha256()
    with open(model, "wb") as file:
        for piece in pieces(size):
            file.write(piece)
            sha256.update(piece)
    config = b'{"config":{"format":"gguf"},"descriptor":{}}'
    digests: dict[str, bytes | Path] = {
        f"sha256:{hashlib.sha256(config).hexdigest()}": config,
        f"sha256:{sha256.hexdigest()}": model,
    }
    described = []
    for (digest, content), kind in zip(digests.items(), ("model.config.v0.1+json", "gguf.v3"), strict=True):
        length = len(content) if isinstance(content, bytes) else content.stat().st_size
        described.append({"mediaType": f"application/vnd.docker.ai.{kind}", "size": length, "digest": digest})
        upload(f"{url}/v2/bench/model", digest, content)
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": described[0], "layers": described[1:]}
    data = json.dumps(manifest).encode()
    send("PUT", f"{url}/v2/bench/model/manifests/latest", data, kind)
    model.unlink()
    return str(described[1]["digest"])


def pieces(size: int) -> Iterator[bytes]:
    """A GGUF header (version 3) with one tensor, and its bytes."""
    elements = (size - 4096) // 4

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += text("blk.0.weight") + struct.pack("<IQIQ", 1, elements, 0, 0)
    yield head + bytes(-len(head) % 32)
    left = elements * 4
    while left:
        yield os.urandom(min(1 << 20, left))
        left -= min(1 << 20, left)


def upload(repository: str, digest: str, content: bytes | Path) -> None:
    """By one PUT."""
    begin = ["curl", "-sf", "-D", "-", "-o", "/dev/null", "-X", "POST", f"{repository}/blobs/uploads/"]
    heads = subprocess.run(begin, check=True, capture_output=True, text=True).stdout.splitlines()
    place = next(line.split(None, 1)[1] for line in heads if line.lower().startswith("location:"))
    body, given = ("-", content) if isinstance(content, bytes) else (str(content), None)
    command = ["curl", "-sf", "-o", "/dev/null", "-H", "Content-Type: application/octet-stream", "-T", body]
    subprocess.run([*command, f"{place}{'&' if '?' in place else '?'}digest={digest}"], check=True, input=given)


def send(method: str, url: str, data: bytes, kind: str) -> None:
    command = ["curl", "-sf", "-X", method, "-H", f"Content-Type: {kind}", "--data-binary", "@-", url]
    subprocess.run(command, check=True, input=data)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
