"""Pulls from a ModelScope hub into a real store."""

from collections.abc import AsyncIterator

import pytest

from modelrunner.errors import InvalidReference, ModelNotFound, SourceFailed
from modelrunner.progress import WorkProgress
from modelrunner.pull import Puller
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.pull.modelscope import ModelScopeSource
from modelrunner.store import Store
from tests.pull.hub import Fault, Repository
from tests.pull.models import gguf
from tests.pull.modelscope import ModelScope
from tests.pull.test_hostile import at_once
from tests.store.folders import model_files

NAME = "modelscope.cn/Org/Tiny-GGUF"
MODEL = gguf(2 << 20)


def quiet(line: WorkProgress) -> None:
    pass


@pytest.fixture
async def scope() -> AsyncIterator[ModelScope]:
    async with ModelScope().running() as scope:
        scope.repositories["Org/Tiny-GGUF"] = Repository(
            {"tiny-Q4_K_M.gguf": MODEL, "tiny-Q8_0.gguf": gguf(4096, seed=8), "README.md": b"# Tiny"}
        )
        yield scope


@pytest.fixture
def puller(store: Store, scope: ModelScope) -> Puller:
    return Puller(store, [HuggingFaceSource("http://127.0.0.1:1"), ModelScopeSource(scope.endpoint, pause=at_once)])


async def test_a_quantization_arrives_whole_and_is_not_fetched_again(
    store: Store, scope: ModelScope, puller: Puller
) -> None:
    model = await puller.pull(NAME, quiet)
    assert store.bundle(model.id).model_file.read_bytes() == MODEL
    assert (model.name, scope.sent) == ("modelscope.cn/org/tiny-gguf", len(MODEL))
    assert (await puller.pull(f"www.{NAME}@master", quiet)).cached
    assert [(each.source, each.version) for each in puller.origins(model.id)] == [(NAME, "master")]
    assert scope.sent == len(MODEL)
    small = await puller.pull(f"{NAME}:q8_0", quiet)
    assert store.bundle(small.id).model_file.read_bytes() == gguf(4096, seed=8)


async def test_a_change_there_is_noticed(scope: ModelScope, puller: Puller) -> None:
    model = await puller.pull(NAME, quiet)
    assert [update.newer for update in await puller.updates(model.id)] == [False]
    scope.repositories["Org/Tiny-GGUF"].files["tiny-Q4_K_M.gguf"] = gguf(4096, seed=2)
    assert [update.newer for update in await puller.updates(model.id)] == [True]
    assert (await puller.pull(NAME, quiet)).id != model.id


async def test_a_tag_is_another_model(store: Store, scope: ModelScope, puller: Puller) -> None:
    scope.repositories["Org/Tiny-GGUF"].branches["v1"] = Repository({"tiny-Q4_K_M.gguf": gguf(4096, seed=1)})
    model = await puller.pull(f"{NAME}@v1", quiet)
    assert model.name == "modelscope.cn/org/tiny-gguf@v1"
    assert store.bundle(model.id).model_file.read_bytes() == gguf(4096, seed=1)


async def test_safetensors_come_with_their_folder(store: Store, scope: ModelScope, puller: Puller) -> None:
    files = model_files()
    scope.repositories["Org/Folder"] = Repository({**files, "weights.bin": b"x", "assets/cat.png": b"x"})
    model = await puller.pull("modelscope.cn/Org/Folder", quiet)
    assert {name: path.read_bytes() for name, path in store.bundle(model.id).files.items()} == files


async def test_a_cut_download_goes_on(scope: ModelScope, puller: Puller) -> None:
    scope.faults.append(Fault(cut=1 << 20))
    await puller.pull(NAME, quiet)
    assert len(scope.contents) == 2
    assert scope.sent == len(MODEL)


async def test_a_token_goes_to_the_hub_and_not_along_its_redirect(scope: ModelScope, puller: Puller) -> None:
    scope.repositories["Org/Tiny-GGUF"].token = "secret"
    with pytest.raises(SourceFailed, match="access refused"):
        await puller.pull(NAME, quiet)
    await puller.pull(NAME, quiet, token="secret")
    assert scope.lookups[-1]["Authorization"] == "Bearer secret"
    assert all("Authorization" not in content.headers for content in scope.contents)


@pytest.mark.parametrize(
    ("text", "error"), [("modelscope.cn/Org/Nothing", ModelNotFound), (f"{NAME}@v9", ModelNotFound)]
)
async def test_what_is_not_there(puller: Puller, text: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="not on the hub"):
        await puller.pull(text, quiet)


@pytest.mark.parametrize("text", ["modelscope.cn/Org", "modelscope.cn/a/b/c", f"{NAME}@sha256:{'0' * 64}"])
async def test_what_is_no_name_of_it(puller: Puller, text: str) -> None:
    with pytest.raises(InvalidReference):
        await puller.pull(text, quiet)


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"<html>", b'{"Code":500}', b'{"Data":{"Files":[{"Path":1}]}}', b'{"Data":{"Files":[{}]}}', b"\xff"],
)
async def test_an_answer_that_is_no_list_of_files(scope: ModelScope, puller: Puller, answer: bytes) -> None:
    scope.answer = answer
    with pytest.raises(SourceFailed):
        await puller.pull(NAME, quiet)


async def test_a_file_without_a_digest_is_not_taken(scope: ModelScope, puller: Puller) -> None:
    scope.hides = True
    with pytest.raises(SourceFailed, match="no sha256 for tiny"):
        await puller.pull(NAME, quiet)
    assert not scope.contents


async def test_it_is_shown_without_a_pull(scope: ModelScope, puller: Puller) -> None:
    preview = await puller.preview(NAME)
    assert (preview.size, preview.version, preview.files) == (len(MODEL), "master", {"tiny-Q4_K_M.gguf": len(MODEL)})
    assert preview.bundle is not None
    assert preview.bundle.header.architecture == "llama"
