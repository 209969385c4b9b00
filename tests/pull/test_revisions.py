"""Revisions of a hub's models: asked for, recorded, and compared with what the hub has now."""

from collections.abc import Callable

import pytest

from modelrunner.errors import InvalidReference, ModelNotFound
from modelrunner.progress import WorkProgress
from modelrunner.pull import Puller
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.store import Reference, Store
from modelrunner.types import ModelFormat
from tests.pull.hub import Hub, Repository
from tests.pull.models import gguf

NAME = "hf.co/Org/Tiny-GGUF"
MAIN, BRANCH = gguf(9000), gguf(9000, seed=7)
ignore: Callable[[WorkProgress], None] = lambda _: None  # noqa: E731


@pytest.fixture
def repository(hub: Hub) -> Repository:
    branch = Repository({"tiny-Q4_K_M.gguf": BRANCH})
    hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": MAIN, "README.md": b"#"})
    hub.repositories["Org/Tiny-GGUF"].branches["v1.2"] = branch
    return hub.repositories["Org/Tiny-GGUF"]


@pytest.fixture
def puller(store: Store, hub: Hub) -> Puller:
    return Puller(store, [HuggingFaceSource(hub.endpoint)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf.co/Org/Repo@v1", "hf.co/org/repo@v1"),
        ("hf.co/Org/Repo:q4_0@Release-1.0", "hf.co/org/repo:Q4_0@Release-1.0"),
        ("hf.co/Org/Repo@main", "hf.co/org/repo"),
        ("https://huggingface.co/Org/Repo/tree/v1", "hf.co/org/repo@v1"),
        ("https://huggingface.co/Org/Repo/blob/main/x-Q4_0.gguf", "hf.co/org/repo:X-Q4_0"),
        ("https://huggingface.co/Org/Repo/resolve/v1/x-Q4_0.gguf?download=true", "hf.co/org/repo:X-Q4_0@v1"),
    ],
)
def test_names_with_a_revision(text: str, expected: str) -> None:
    found = Reference.parse(text)
    assert found.short == expected
    assert Reference.parse(found.short) == Reference.parse(str(found)) == found


@pytest.mark.parametrize("revision", ["", "..", "a/b", "a b", "\n", "x" * 200, "-x"])
def test_revisions_that_are_none(revision: str) -> None:
    with pytest.raises(InvalidReference):
        Reference.parse(f"hf.co/Org/Repo@{revision}")


async def test_a_branch_and_its_commit_are_pulled_and_recorded(
    puller: Puller, store: Store, hub: Hub, repository: Repository
) -> None:
    branch = repository.branches["v1.2"]
    pulled = await puller.pull(f"{NAME}@v1.2", ignore)
    assert pulled.name == "hf.co/org/tiny-gguf@v1.2"
    assert store.bundle(pulled.name).model_file.read_bytes() == BRANCH
    assert [(each.name, each.version) for each in puller.origins(pulled.id)] == [(pulled.name, branch.commit)]
    main = await puller.pull(NAME, ignore)
    assert store.bundle(main.id).model_file.read_bytes() == MAIN
    by_commit = await puller.pull(f"{NAME}@{branch.commit}", ignore)
    assert by_commit.id == pulled.id
    with pytest.raises(ModelNotFound, match="nowhere"):
        await puller.pull(f"{NAME}@nowhere", ignore)


async def test_a_newer_model_at_the_source_is_told(puller: Puller, hub: Hub, repository: Repository) -> None:
    id = (await puller.pull(NAME, ignore)).id
    assert [each.newer for each in await puller.updates(id)] == [False]
    repository.files["README.md"] = b"# another commit"
    assert [each.newer for each in await puller.updates(id)] == [False]
    repository.files["tiny-Q4_K_M.gguf"] = gguf(9000, seed=99)
    assert [(each.name, each.newer) for each in await puller.updates(id)] == [("hf.co/org/tiny-gguf", True)]
    hub.status = 503
    (unknown,) = await puller.updates(id)
    assert unknown.newer is None
    assert "503" in unknown.reason


async def test_a_search_names_what_can_be_pulled(
    puller: Puller, store: Store, hub: Hub, repository: Repository
) -> None:
    found = await puller.search("tiny", ModelFormat.GGUF, 5)
    assert [(each.name, each.downloads, each.gated) for each in found] == [("hf.co/Org/Tiny-GGUF", 1200, True)]
    assert (await puller.pull(found[0].name, ignore)).id in {model.id for model in store.list()}
    assert await puller.search("tiny", ModelFormat.SAFETENSORS, 5) == []
