"""How little of our code a warm request touches: counted by the interpreter, in a whole daemon."""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import modelrunner
from tests.api.conftest import Daemon, StartDaemon

_OWN = str(Path(modelrunner.__file__).parent)
_BODY = json.dumps({"model": "smol", "messages": [{"role": "user", "content": "hello"}]}).encode()


class Count:
    """Calls of functions of the package on this thread, by file, while it is entered."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.calls: list[str] = []

    def __enter__(self) -> "Count":
        sys.setprofile(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OWN):
            name = frame.f_code.co_filename.removeprefix(_OWN).lstrip("/")
            self.files[name] += 1
            self.calls.append(f"{name}:{frame.f_code.co_qualname}")


async def chat(daemon: Daemon, path: str = "/v1/chat/completions") -> Count:
    """The calls of a warm chat on a TCP connection that had some before: of several, the one with the fewest, since a
    timer may come between."""
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{daemon.port}\r\nContent-Length: {len(_BODY)}\r\n\r\n"
    counts = []
    for _ in range(8):
        with Count() as counted:
            writer.write(head.encode() + _BODY)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            await asyncio.sleep(0)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        counts.append(counted)
    writer.close()
    return min(counts, key=lambda count: len(count.calls))


async def test_a_warm_chat_costs_no_task(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Nor does anything in it grow with what the daemon has: models, connections."""
    few = await chat(await start_daemon(models={"smol": 0}, folder=tmp_path / "few", telemetry=False))
    models = {"smol": 0} | {f"other{number}": number for number in range(1, 9)}
    others = await start_daemon(models=models, folder=tmp_path / "many", telemetry=False)
    idle = [await asyncio.open_connection("127.0.0.1", others.port) for _ in range(50)]
    many = await chat(others)
    assert few.calls == many.calls
    assert not [call for call in few.calls if call.endswith(("SideWork.do", "guarded"))]
    for _, writer in idle:
        writer.close()


async def test_telemetry_comes_at_the_end(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """It measures the answer on its way, and adds up once the answer is over."""
    without = await chat(await start_daemon(models={"smol": 0}, folder=tmp_path / "off", telemetry=False))
    counted = await chat(await start_daemon(models={"smol": 0}, folder=tmp_path / "with"))
    own = {name for name in counted.files if name.startswith("telemetry/") or name == "gateway/request/observers.py"}
    assert own
    assert not own & set(without.files)
