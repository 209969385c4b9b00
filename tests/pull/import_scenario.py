"""Run under strace by test_import_crashes.py: takes models of other programs in many child processes, of which child N
is struck at the Nth call of the traced system call."""

import asyncio
import os
import sys
from pathlib import Path

from modelrunner.concurrency.threads import Pool
from modelrunner.errors import ModelRunnerError
from modelrunner.models.foreign import ForeignStores
from modelrunner.pull import Puller
from modelrunner.store import Store
from tests.oci.scenario import inline, spend

NAMES = ("registry.ollama.ai/library/tiny:carries", "hf.co/org/folder", "hf.co/maker/thing:THING-Q8_0")


def stores(folder: Path) -> ForeignStores:
    return ForeignStores(folder / "hub", (folder / "ollama",), (folder / "lmstudio",))


async def take(puller: Puller, store: Store, folder: Path, name: str) -> str:
    """As the daemon does it. Returns the model's ID."""
    model = await asyncio.to_thread(stores(folder / "theirs").get, name, store.partial)
    recipe = model.recipe()
    making = recipe.making(None) if recipe else None
    return (await puller.pull(model.source, lambda line: None, name=model.name, making=making)).id


async def take_all(folder: Path) -> None:
    asyncio.get_running_loop().set_default_executor(Pool("files", 1, prompt=True))
    store = Store(folder / "data")
    puller = Puller(store, [])
    for number, name in enumerate(NAMES):
        try:
            await take(puller, store, folder, name)
        except ModelRunnerError as error:
            os.mkdir(folder / f"refused {number} {error.code}")  # a call that is never struck
        except Exception as error:
            os.mkdir(folder / f"crashed {number} {type(error).__name__}")
        else:
            os.mkdir(folder / f"done {number}")


def main(call: str, when: int, root: Path) -> None:
    Pool.submit = inline  # type: ignore[method-assign, assignment]
    for folder in sorted(root.iterdir(), key=lambda folder: int(folder.name)):
        n = int(folder.name)
        child = os.fork()
        if not child:
            try:
                spend(call, when - n, folder)
                asyncio.run(take_all(folder))
            finally:
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
