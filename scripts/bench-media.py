"""`scripts/bench media`: what a transcription, a speech and a picture cost by the daemon, against the engine asked
directly. The engine is a program that reads a body and answers at once, configured by a table; each request of the one
way is followed by one of the other, and the figures are medians.

Usage: bench-media.py [--requests 300] [--sizes 1,16,64]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENGINE = """
import asyncio, sys

async def serve(reader, writer):
    while head := await reader.readuntil(b"\\r\\n\\r\\n"):
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\\r\\n")[1:] if b": " in line)
        left = int(lines.get(b"content-length", 0))
        while left:
            left -= len(await reader.read(min(left, 1 << 18)))
        path = head.split(b" ", 2)[1]
        kind, body = (b"audio/wav", bytes(48000)) if b"speech" in path else (b"application/json", b'{"text": "hello"}')
        head = b"HTTP/1.1 200 OK\\r\\nContent-Type: %b\\r\\nContent-Length: %d\\r\\n\\r\\n" % (kind, len(body))
        writer.write(head + body)

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]), limit=1 << 18)
    open(sys.argv[2], "w").write(sys.argv[1])
    print("is listening", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
CONFIG = """
listen = "127.0.0.1:0"
[engines.media]
command = [{python}, {engine}, "{{port}}", {told}]
models = [{{ name = "m", size = "1MB" }}]
endpoints = {{ "/v1/audio/transcriptions" = "transcription", "/v1/audio/speech" = "speech", \
"/v1/images/generations" = "image" }}
ready = {{ line = "is listening" }}
"""
FORM = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b\r\n' + (
    b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n--b--\r\n'
)
MB = 10**6
COST, COST_OF_A_MB = 1.0, 2.0  # milliseconds that are asked


def request(path: str, body: bytes, kind: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


JSON = "application/json"
PICTURE = request("/v1/images/generations", b'{"model": "m", "prompt": "a cat"}', JSON)


def asked(connection: socket.socket, data: bytes) -> float:
    """Returns the seconds until the answer was there. Raises `RuntimeError` for another answer than 200."""
    began = time.perf_counter()
    connection.sendall(data)
    seen = bytearray()
    while (end := seen.find(b"\r\n\r\n")) < 0:
        seen += _some(connection)
    lines = bytes(seen[:end]).lower().split(b"\r\n")
    whole = end + 4 + next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
    while len(seen) < whole:
        seen += _some(connection)
    took = time.perf_counter() - began
    if b" 200 " not in lines[0] + b" ":
        raise RuntimeError(bytes(seen[:2000]).decode(errors="replace"))
    return took


def _some(connection: socket.socket) -> bytes:
    if not (data := connection.recv(1 << 18)):
        raise RuntimeError("the connection has ended")
    return data


def connect(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=60)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def compare(daemon: int, engine: int, data: bytes, requests: int) -> tuple[float, float]:
    """Returns the median milliseconds of the engine asked directly, and what the daemon adds."""
    with connect(daemon) as by, connect(engine) as direct:
        for connection in (by, direct):
            asked(connection, data)
        pairs = [(asked(direct, data), asked(by, data)) for _ in range(requests)]
    return 1000 * statistics.median(a for a, _ in pairs), 1000 * statistics.median(b - a for a, b in pairs)


def measure(daemon: int, engine: int, requests: int, sizes: list[int]) -> None:
    texts = {
        "speech": request("/v1/audio/speech", b'{"model": "m", "input": "hello"}', JSON),
        "picture": PICTURE,
    }
    kind = "multipart/form-data; boundary=b"
    for size in (0, *sizes):
        data = request("/v1/audio/transcriptions", FORM % bytes(size * MB or 1000), kind)
        texts[f"transcription of {f'{size} MB' if size else '1 kB'}"] = data
    print(f"{'':24}{'engine':>10}{'daemon adds':>14}{'asked':>10}")
    for name, data in texts.items():
        count = max(10, requests // (1 + len(data) // MB))
        direct, more = compare(daemon, engine, data, count)
        most = COST + COST_OF_A_MB * (len(data) // MB)
        print(f"{name:24}{direct:>7.2f} ms{more:>11.2f} ms{most:>7.0f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--sizes", default="1,16,64")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench") as place:
        folder = Path(place)
        (folder / "engine.py").write_text(ENGINE)
        words = {"python": sys.executable, "engine": str(folder / "engine.py"), "told": str(folder / "port")}
        (folder / "config.toml").write_text(CONFIG.format(**{name: json.dumps(text) for name, text in words.items()}))
        variables = {**os.environ, "MODELRUNNER_DATA_DIR": str(folder / "data"), "MODELRUNNER_SANDBOX": "off"}
        variables |= {"MODELRUNNER_CONFIG": str(folder / "config.toml"), "MODELRUNNER_RUNTIME_DIR": str(folder / "run")}
        program = Path(sys.executable).with_name("modelrunner")
        daemon = subprocess.Popen([program, "serve"], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            while True:
                status = subprocess.run([program, "status", "--json"], env=variables, capture_output=True, check=False)
                if status.returncode == 0 and daemon.poll() is None:
                    break
                time.sleep(0.1)
            port = int(json.loads(status.stdout)["listen"].rpartition(":")[2])
            with connect(port) as first:
                asked(first, PICTURE)  # which loads the engine
            sizes = [int(size) for size in options.sizes.split(",")]
            measure(port, int((folder / "port").read_text()), options.requests, sizes)
        finally:
            daemon.terminate()
            daemon.wait()


if __name__ == "__main__":
    main()
