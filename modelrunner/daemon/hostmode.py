"""The daemon as a host of another one, its head: the same supervision, without queues and clients."""

import asyncio
import json
import os
import sys

from modelrunner.cluster.hostserver import HostServer
from modelrunner.cluster.messages import NAME
from modelrunner.config.settings import Settings
from modelrunner.daemon import instance
from modelrunner.daemon.certificates import self_signed
from modelrunner.daemon.parts import build
from modelrunner.errors import BadRequest, ModelRunnerError

KEY = "MODELRUNNER_HOST_KEY"


def run_host(settings: Settings, address: str) -> None:
    """Runs until the standard input ends or a signal comes. Prints why it cannot begin, for its head, and raises as
    `serve_host`."""
    import uvloop

    instance.prepare_process()
    try:
        uvloop.run(serve_host(settings, address))
    except instance.AlreadyRunning as error:
        problem = f"another head has this machine already, or another daemon its folder {settings.data_dir} ({error})"
        print(json.dumps({"problem": problem}), flush=True)
        raise
    except ModelRunnerError as error:
        print(json.dumps({"problem": f"modelrunner does not start there: {error}"}), flush=True)
        raise


async def serve_host(settings: Settings, address: str) -> None:
    """Listens on the `address` of this machine for the head that knows the key in the environment, and prints one line
    of JSON, its port and certificate. Nothing is left at its end. Raises `BadRequest` without a key, `AlreadyRunning`,
    `ConfigurationError`, `StorageFailed`."""
    if not (key := os.environ.pop(KEY, "")):
        raise BadRequest(f"a host is started by its head, which gives it a key in {KEY}")
    async with instance.opened(settings.data_dir, settings.socket, settings.log_level, settings.runtime_folder):
        parts = await asyncio.to_thread(build, settings)
        folder = settings.data_dir / "cluster"
        (folder / "certificate.pem").unlink(missing_ok=True)  # another one for each head
        certificate = await asyncio.to_thread(self_signed, folder, [address, NAME])
        server = HostServer(
            parts.host,
            parts.registry,
            parts.specs,
            parts.store,
            parts.library,
            parts.installer,
            parts.last_used,
            key=key,
            address=address,
            tls=certificate.current(),
            folder=folder,
        )
        lifecycle = instance.Lifecycle()
        with lifecycle.on_signals(last=True):
            port = await server.start()
            text = await asyncio.to_thread((folder / "certificate.pem").read_text, "ascii")
            print(json.dumps({"port": port, "certificate": text}), flush=True)
            ended = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
            ended.add_done_callback(lambda task: lifecycle.request_stop())
            uses = asyncio.create_task(parts.last_used.run())
            try:
                await lifecycle.stop.wait()
            finally:
                await server.close()
                uses.cancel()
                await asyncio.gather(uses, return_exceptions=True)
                await parts.installer.close()
                parts.registry.close()
                parts.store.close()
