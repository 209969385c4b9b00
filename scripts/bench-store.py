"""A daemon with thousands of models: its start, listing, changes and names, beside a daemon with one model.

    python scripts/bench-store.py [MODELS]

Makes a store of MODELS (10,000) tiny models, each with files of its own, written directly, as a store of years would
be. Targets with 10,000: start under 1 s more than without models, `GET /models` 300 ms, a change 50 ms, a partial name
5 ms. Prints medians, and what the same takes with one model.
"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import gguf
import numpy as np

from modelrunner.store import Blob, Digest, Store
from modelrunner.store.blobs import Blobs
from modelrunner.store.bundles import Bundles
from modelrunner.store.draft import Draft
from modelrunner.store.records import Records
from modelrunner.store.references import Reference

PROGRAM = str(Path(sys.executable).with_name("modelrunner"))
ROUNDS = 9


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as folder:
        stores = {number: Path(folder) / f"models-{number}" for number in (1, count)}
        found = {}
        for number, data in stores.items():
            fill(data, number)
            for warm in ("first start", "start"):
                begin = time.perf_counter()
                with daemon(data) as connect:
                    began = time.perf_counter() - begin
                    if warm == "start":
                        found[number] = {"start": began} | measure(connect, Path(folder))
                    else:
                        listed = seconds(lambda connect=connect: connect("GET", "/models"))
                        first = {"first start": began, "first GET /models": listed}
            found[number] |= first
    print(f"{'':24}{'1 model':>12}{f'{count} models':>16}")
    for name in found[count]:
        print(f"{name:<24}{found[1][name] * 1000:9.1f} ms{found[count][name] * 1000:13.1f} ms")


def fill(data: Path, count: int) -> None:
    """Writes blobs, manifests and names as the store does, without a sync."""
    template = data.with_suffix(".gguf")
    write_gguf(template)
    head = template.read_bytes()[:-8]
    Store(data)
    blobs = Blobs(data / "blobs/sha256")
    bundles = Bundles(data / "bundles", blobs)
    kept = Records(data / "manifests/sha256")
    for number in range(count):
        content = head + number.to_bytes(8, "little")
        digest = Digest.of(content)
        path = digest.within(data / "blobs/sha256")
        path.write_bytes(content)
        draft = Draft.of({"m.gguf": Blob(digest, len(content), path)}, {"m.gguf": path}, trust=False)
        draft.id.within(data / "manifests/sha256").write_bytes(draft.manifest)
        draft.contents.config.digest.within(data / "blobs/sha256").write_bytes(draft.config_data)
        name = Reference.parse(f"org{number % 100}/model-{number:05}-instruct:7b-q4")
        bundles.lay_out(draft.id, draft.contents)
        bundles.remember(draft.id, draft.header)
        kept.write(draft.entry(None, name, number, now=number).record)


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    for number in range(20):
        writer.add_string(f"general.note{number}", "as long as a metadata value often is " * 2)
    writer.add_token_list([f"token{n}" for n in range(64)])
    writer.add_token_scores([0.5] * 64)
    writer.add_tensor("blk.0.weight", np.zeros((32, 64), dtype=np.float16))
    writer.add_tensor("blk.1.weight", np.zeros((64,), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextlib.contextmanager
def daemon(data: Path) -> Iterator[Callable[..., bytes]]:
    """Yields a function that asks the daemon, when it answers."""
    with tempfile.TemporaryDirectory() as folder:
        places = {"DATA_DIR": str(data), "CACHE_DIR": f"{folder}/c", "RUNTIME_DIR": f"{folder}/r"}
        environ = os.environ | {f"MODELRUNNER_{name}": path for name, path in places.items()}
        environ |= {"MODELRUNNER_LISTEN": "", "MODELRUNNER_CONFIG": f"{folder}/config.toml"}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program is compiled once, not at each start
        process = subprocess.Popen([PROGRAM, "serve"], env=environ, stderr=subprocess.DEVNULL)
        path = Path(folder) / "r/modelrunner.sock"
        try:
            while True:
                with contextlib.suppress(OSError):
                    ask(path, "GET", "/version")
                    break
                time.sleep(0.01)
            yield lambda method, route, body=None: ask(path, method, route, body)
        finally:
            process.terminate()
            process.wait()


def ask(path: Path, method: str, route: str, body: object = None) -> bytes:
    connection = HTTPConnection("localhost")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection.sock:
        connection.sock.connect(str(path))
        connection.request(method, route, json.dumps(body) if body else None)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status >= 400:
            raise SystemExit(f"{method} {route}: {answer.status} {data.decode()}")
        return data


def measure(connect: Callable[..., bytes], folder: Path) -> dict[str, float]:
    taken: dict[str, list[float]] = {}

    def timed(name: str, method: str, route: str, body: object = None) -> None:
        begin = time.perf_counter()
        connect(method, route, body)
        taken.setdefault(name, []).append(time.perf_counter() - begin)

    for number in range(ROUNDS):
        made = folder / f"new-{number}.gguf"
        write_gguf(made)
        made.write_bytes(made.read_bytes()[:-8] + (10**6 + number).to_bytes(8, "little"))
        body = {"from": made.as_uri(), "name": f"new-{number}"}
        timed("GET /models", "GET", "/models")
        timed("GET /version", "GET", "/version")
        timed("part of a name", "GET", "/models/model-00000")
        timed("tag", "POST", f"/models/org0%2Fmodel-00000-instruct%3A7b-q4/tag?repo=more&tag=n{number}")
        timed("package", "POST", "/models/create", body)
        timed("rm of a name", "DELETE", f"/models/more%3An{number}")
        timed("rm of a model", "DELETE", f"/models/new-{number}")
    return {name: statistics.median(values) for name, values in taken.items()}


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
