"""A pull from a registry on loopback against curl piped into sha256sum and against skopeo, and a pull from a hub
against huggingface_hub's own download: all write to the same disk, and are over when their files are synced. The hub's
files are redirects to the same registry, as a real hub's lead to its storage; its answers offer no Xet. huggingface_hub
checks no digest. Then the time to the first token of a chat: alone, while the daemon pulls, and while curl runs.

    scripts/bench pull [--size BYTES] [--rounds N] [--folder DIR] [--no-chat]

Each round runs all of them, one after the other, another one first. Ours is a process of its own with a new store: its
time includes Python's start, and that the model is verified, stored, laid out and its header read. Needs
docker-registry, skopeo and curl (scripts/setup-ci), the chat an engine (scripts/install-engine)."""

import argparse
import contextlib
import hashlib
import http.server
import json
import math
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop
from meanwhile import first_tokens

from tests.oci.registry import serving

WAYS = ("curl | sha256sum", "skopeo copy", "modelrunner", "huggingface_hub", "modelrunner, hub")
HUB_NAME, HUB_FILE = "bench/model", "model-F32.gguf"
COMMIT = "0" * 40


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--size", type=int, default=1_000_000_000, help="bytes of the model")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write: on the disk that is measured")
    options.add_argument("--no-chat", action="store_true", help="leave the chat out")
    options.add_argument("--pull", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.pull:
        uvloop.run(pull(given.pull[0], Path(given.pull[1])))
        return
    with tempfile.TemporaryDirectory(prefix="bench-pull-", dir=given.folder) as folder:
        measure(Path(folder), given.size, given.rounds, chat=not given.no_chat)


def measure(folder: Path, size: int, rounds: int, *, chat: bool) -> None:
    with serving(folder / "registry") as registry:
        path, blob = "bench/model", publish(folder, registry.url, size)
        name, url = f"{registry.host}/bench/model:latest", f"{registry.url}/v2/{path}/blobs/{blob}"
        length = int(head(url)["content-length"])
        hub = hub_of(url, length, blob.removeprefix("sha256:"))
        os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.server_address[1]}"
        best, least = dict.fromkeys(WAYS, math.inf), dict.fromkeys(WAYS, math.inf)
        peak = 0
        for turn in range(rounds):
            for way in (*WAYS[turn % len(WAYS) :], *WAYS[: turn % len(WAYS)]):
                target = folder / "target"
                target.mkdir()
                os.sync()
                began, used = time.perf_counter(), processor_seconds()
                if way.startswith("modelrunner"):
                    peak = max(peak, run_pull(f"hf.co/{HUB_NAME}" if "hub" in way else name, target))
                elif way == "huggingface_hub":
                    call = f"hf_hub_download({HUB_NAME!r}, {HUB_FILE!r}, cache_dir={str(target)!r})"
                    script = f"from huggingface_hub import hf_hub_download; {call}"
                    subprocess.run([sys.executable, "-c", script], check=True, stderr=subprocess.DEVNULL)
                    sync(target)
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
                best[way], least[way] = min(best[way], took), min(least[way], used)
                rate = f"{took:6.2f} s {size / took / 1e6:6.0f} MB/s {used:6.2f} s of processor"
                print(f"  round {turn + 1}: {way:17} {rate}", flush=True)
                shutil.rmtree(target)
        hub.shutdown()
        hub.server_close()
        fastest = min(best.values())
        print("\nbest of each, its share of the fastest's rate, and the least processor time:")
        for way in WAYS:
            print(f"  {way:17} {best[way]:6.2f} s  {fastest / best[way]:.2f}  {least[way]:6.2f} s")
        print(f"peak memory of the pull: {peak / 1e6:.0f} MB", flush=True)
        if chat:
            print("\nfirst token of a chat, median, and against alone:")
            times = first_tokens(folder / "chat", name, url, rounds)
            for what, seconds in times.items():
                print(f"  {what:27} {seconds * 1e3:6.0f} ms  {seconds / times['alone']:.2f}")


def hub_of(url: str, size: int, sha256: str) -> http.server.ThreadingHTTPServer:
    """A hub with one file, which lies at `url`: the answers of https://huggingface.co/docs/hub/api that a download
    takes."""
    file = {"rfilename": HUB_FILE, "size": size, "blobId": COMMIT, "lfs": {"sha256": sha256, "size": size}}
    listing = json.dumps({"id": HUB_NAME, "sha": COMMIT, "siblings": [file]}).encode()
    told = {"X-Repo-Commit": COMMIT, "X-Linked-Size": str(size), "X-Linked-ETag": f'"{sha256}"', "ETag": f'"{sha256}"'}

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_file = "/resolve/" in self.path
            self.send_response(302 if is_file else 200)
            body = b"" if is_file or self.command == "HEAD" else listing
            for name, value in {**(told | {"Location": url} if is_file else {}), "Content-Length": len(body)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    return hub


def head(url: str) -> dict[str, str]:
    told = subprocess.run(["curl", "-sfI", url], check=True, capture_output=True, text=True).stdout
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in told.splitlines())}


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
    from modelrunner.pull.huggingface import HuggingFaceSource
    from modelrunner.pull.ociregistry import RegistrySource
    from modelrunner.store import Store

    source = RegistrySource(Registries(), Credentials(folder / "logins.json"))
    await Puller(Store(folder / "data"), [HuggingFaceSource(), source]).pull(name, lambda line: None)
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
