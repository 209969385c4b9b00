"""A GGUF file at an address, with the digest that the person gives."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.errors import InvalidModel, InvalidReference, ModelNotFound, ModelRunnerError, SourceFailed
from modelrunner.progress import WorkProgress
from modelrunner.pull import Puller
from modelrunner.pull.address import Address, AddressSource
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.store import Store
from tests.pull.hub import Fault, Hub, Repository, sha256
from tests.pull.models import gguf
from tests.pull.test_hostile import at_once

MODEL = gguf(2 << 20)
HEX = "0123456789abcdef" * 4


def quiet(line: WorkProgress) -> None:
    pass


@pytest.fixture
def puller(store: Store, hub: Hub) -> Puller:
    hub.repositories["Org/Tiny"] = Repository({"Tiny Q4.gguf": MODEL, "page.gguf": b"<html>"})
    return Puller(store, [HuggingFaceSource(hub.endpoint), AddressSource(pause=at_once)])


def url(hub: Hub, file: str = "Tiny%20Q4.gguf") -> str:
    """A redirect to another server, which knows no HEAD."""
    return f"{hub.endpoint}/Org/Tiny/resolve/main/{file}"


async def test_it_arrives_under_the_name_of_its_place(store: Store, hub: Hub, puller: Puller) -> None:
    text = f"{url(hub)}#sha256={sha256(MODEL).upper()}"
    model = await puller.pull(text, quiet)
    assert store.bundle(model.id).model_file.read_bytes() == MODEL
    assert model.name == f"{hub.endpoint.removeprefix('http://')}/org/tiny/resolve/main/tiny-q4"
    assert [each.version for each in puller.origins(model.id)] == [f"sha256:{sha256(MODEL)}"]
    asked = len(hub.contents)
    assert (await puller.pull(text, quiet)).cached
    assert [update.newer for update in await puller.updates(model.id)] == [False]
    assert (await puller.pull(text, quiet, name="mine")).id == model.id
    assert len(hub.contents) == asked


async def test_a_cut_download_goes_on(hub: Hub, puller: Puller) -> None:
    hub.faults.extend([Fault(), Fault(cut=1 << 20)])
    await puller.pull(f"{url(hub)}#sha256={sha256(MODEL)}", quiet)
    assert [content.sent for content in hub.contents] == [1, 1 << 20, len(MODEL) - (1 << 20)]


async def test_another_file_than_the_one_named_is_refused(store: Store, hub: Hub, puller: Puller) -> None:
    with pytest.raises(SourceFailed, match="digest is not"):
        await puller.pull(f"{url(hub)}#sha256={HEX}", quiet)
    with pytest.raises(InvalidModel):
        await puller.pull(f"{url(hub, 'page.gguf')}#sha256={sha256(b'<html>')}", quiet)
    assert not store.list()


async def test_what_is_not_there_is_said(hub: Hub, puller: Puller) -> None:
    hub.status = 404
    with pytest.raises(ModelNotFound, match="check the address"):
        await puller.pull(f"{url(hub)}#sha256={HEX}", quiet)
    hub.status = 403
    with pytest.raises(SourceFailed, match="access refused"):
        await puller.pull(f"{url(hub)}#sha256={HEX}", quiet)


async def test_a_token_goes_to_the_address_and_not_along_its_redirect(hub: Hub, puller: Puller) -> None:
    hub.repositories["Org/Tiny"].token = "secret"
    await puller.pull(f"{url(hub)}#sha256={sha256(MODEL)}", quiet, token="secret")
    assert all("Authorization" not in content.headers for content in hub.contents)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("https://example.com/m.gguf", "--sha256"),
        ("https://example.com/m.gguf#sha256=12", "--sha256"),
        ("https://example.com/m.gguf#md5=12", "--sha256"),
        (f"http://example.com/m.gguf#sha256={HEX}", "without TLS"),
        (f"http://10.0.0.1/m.gguf#sha256={HEX}", "without TLS"),
        (f"https://example.com/m.bin#sha256={HEX}", "must be that of a GGUF file"),
        (f"https://example.com/m.gguf?token=hush#sha256={HEX}", "password or query"),
        (f"https://ada:hush@example.com/m.gguf#sha256={HEX}", "password or query"),
        (f"https://[::1/m.gguf#sha256={HEX}", "not an address"),
        (f"https://example.com:x/m.gguf#sha256={HEX}", "not an address"),
    ],
)
async def test_an_address_that_is_not_taken(puller: Puller, text: str, told: str) -> None:
    with pytest.raises(InvalidReference) as caught:
        await puller.pull(text, quiet)
    assert told in caught.value.message
    assert "hush" not in caught.value.message


async def test_a_pasted_page_of_a_hub_keeps_the_digest_that_was_given(puller: Puller) -> None:
    """It is an address then, whose path makes no name."""
    with pytest.raises(InvalidReference, match="give one with `--name`"):
        await puller.pull(f"https://huggingface.co/Org/Tiny/resolve/main/m.gguf#sha256={HEX}", quiet)


async def test_it_is_shown_without_a_pull(hub: Hub, puller: Puller) -> None:
    preview = await puller.preview(f"{url(hub)}#sha256={sha256(MODEL)}")
    assert (preview.files, preview.version) == ({"Tiny Q4.gguf": len(MODEL)}, f"sha256:{sha256(MODEL)}")
    assert preview.bundle is not None
    assert hub.sent < len(MODEL) + 2


@given(st.text(st.sampled_from(string.printable), max_size=60))
def test_any_path_gives_a_name_or_a_fault_of_ours(path: str) -> None:
    try:
        address = Address.parse(f"https://example.com/{path}.gguf#sha256={HEX}")
        assert Address.parse(str(address)) == address
        assert address.name.host == "example.com"
    except ModelRunnerError:
        pass
