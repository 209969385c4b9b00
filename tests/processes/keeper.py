"""A daemon in miniature, to be killed: keeps the engine of its arguments and kills itself with SIGKILL after so many
seconds, its guardians with it if asked to. A confined engine may start processes, a
lone one may not."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil

from modelrunner.processes import process
from modelrunner.sandbox import Permissions
from modelrunner.types import ProcessOptions


async def main(seconds: float, victims: str, log: Path, argv: list[str]) -> None:
    confined = {"daemon of a confined engine": "workers", "daemon of a lone engine": ""}
    permissions = Permissions(writes=(log.parent,), processes=confined[victims]) if victims in confined else None
    options = ProcessOptions(log, permissions=permissions)
    kept = asyncio.create_task(process.run(argv, env=process.scrubbed_environment(), options=options))
    await asyncio.wait([kept], timeout=seconds)
    for guardian in psutil.Process().children() if victims == "all" else ():
        guardian.kill()
    os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main(float(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]))
