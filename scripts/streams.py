"""How `scripts/bench engine` asks: whole streams on a Unix socket, with nothing between the clock and the bytes."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """Who is asked, and by which name it knows the model."""

    socket: Path
    model: str


def payload(model: str, tokens: int) -> bytes:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Write a long story about the sea."},
    ]
    fields = {"model": model, "messages": messages, "temperature": 0, "max_tokens": tokens, "stream": True}
    return json.dumps(fields | {"ignore_eos": True}).encode()


async def exchange(socket: Path, method: str, path: str, body: bytes = b"") -> AsyncGenerator[bytes]:
    """The response as it arrives, head included."""
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        while piece := await reader.read(65536):
            yield piece
    finally:
        writer.close()


async def stream(target: Target, tokens: int) -> float:
    """Seconds to the first token. All of them come."""
    began, first, pieces = time.perf_counter(), 0.0, []
    async for piece in exchange(target.socket, "POST", "/v1/chat/completions", payload(target.model, tokens)):
        if not first and b'"content":"' in piece:
            first = time.perf_counter() - began
        pieces.append(piece)
    if b'"finish_reason":"length"' not in b"".join(pieces):
        raise SystemExit(f"{target.socket} did not stream {tokens} tokens, but {b''.join(pieces)[-500:]!r}")
    return first


async def get_json(socket: Path, path: str, method: str = "GET", body: bytes = b"") -> object:
    raw = b"".join([piece async for piece in exchange(socket, method, path, body)])
    head, _, rest = raw.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0] + b" ":
        raise SystemExit(f"{path}: {raw[:500]!r}")
    if b"chunked" in head.lower():
        rest = rest.split(b"\r\n")[1]
    return json.loads(rest)


async def healthy(socket: Path) -> None:
    while True:
        try:
            async for piece in exchange(socket, "GET", "/health"):
                if b" 200 " in piece[:16]:
                    return
                break
        except OSError:
            pass
        await asyncio.sleep(0.005)
