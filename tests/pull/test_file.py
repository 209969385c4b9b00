"""Local files, through the public Puller into a real store."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from modelrunner.errors import BadRequest, InvalidModel, ModelNotFound, ModelRunnerError, UnsupportedModel
from modelrunner.models.orders import parse_extras
from modelrunner.pull import Puller
from modelrunner.pull.file import Extras, LocalFiles, path_of
from modelrunner.store import Store
from tests.pull.models import gguf, shards
from tests.store.folders import model_files, sharded, write
from tests.store.samples import write_gguf


@pytest.fixture
def puller(store: Store) -> Puller:
    return Puller(store, [])


async def test_the_file_is_copied_and_stays_where_it_is(puller: Puller, store: Store, tmp_path: Path) -> None:
    original = tmp_path / "my model %41.gguf"
    original.write_bytes(gguf())
    model = await puller.pull(
        LocalFiles(path_of(f"file://{tmp_path}/my%20model%20%2541.gguf", "from")), lambda _: None, name="mine"
    )
    assert model.name == "mine"
    original.write_bytes(b"changed afterwards")
    assert store.bundle("mine").model_file.read_bytes() == gguf()
    assert list(store.partial.iterdir()) == []


async def test_a_changed_file_is_taken_anew(puller: Puller, store: Store, tmp_path: Path) -> None:
    original = tmp_path / "m.gguf"
    original.write_bytes(gguf())
    first = await puller.pull(LocalFiles(original), lambda _: None, name="mine")
    original.write_bytes(gguf(seed=1))
    assert (await puller.pull(LocalFiles(original), lambda _: None, name="mine")).id != first.id


async def test_shards_come_along(puller: Puller, store: Store, tmp_path: Path) -> None:
    for number, part in enumerate(shards(2), 1):
        (tmp_path / f"m-{number:05}-of-00002.gguf").write_bytes(part)
    await puller.pull(LocalFiles(tmp_path / "m-00001-of-00002.gguf"), lambda _: None, name="mine")
    assert [path.read_bytes() for path in store.bundle("mine").files.values()] == shards(2)


async def test_links_are_followed_once_as_in_the_cache_of_hugging_face(
    puller: Puller, store: Store, tmp_path: Path
) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    files = {"file/" + name: content for name, content in model_files().items()}
    files |= {f"m-{number:05}-of-00002.gguf": part for number, part in enumerate(shards(2), 1)}
    blobs.mkdir()
    for number, (name, content) in enumerate(files.items()):
        (blobs / str(number)).write_bytes(content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(f"{'../' * name.count('/')}../blobs/{number}")
    (tmp_path / "folder").symlink_to(snapshot / "file")
    await puller.pull(LocalFiles(tmp_path / "folder"), lambda _: None, name="folder")
    assert {name: path.read_bytes() for name, path in store.bundle("folder").files.items()} == model_files()
    (tmp_path / "short").symlink_to(snapshot / "m-00001-of-00002.gguf")
    await puller.pull(LocalFiles(snapshot / "m-00001-of-00002.gguf"), lambda _: None, name="sharded")
    assert [path.read_bytes() for path in store.bundle("sharded").files.values()] == shards(2)
    assert all(path.is_file() and not path.is_symlink() for path in store.bundle("sharded").files.values())


async def test_a_projector_and_a_template_come_along(puller: Puller, store: Store, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", metadata={"tokenizer.chat_template": "{{ tools }}{{ tool_calls }}"})
    told = {"clip.has_audio_encoder": True}
    projector = write_gguf(tmp_path / "eyes and ears", architecture="clip", seed=1, metadata=told)
    (tmp_path / "plain").write_text("{{ messages }}")
    extras = parse_extras(projector.as_uri(), (tmp_path / "plain").as_uri())
    await puller.pull(LocalFiles(model, extras), lambda _: None, name="mine")
    bundle = store.bundle("mine")
    assert list(bundle.files) == ["model.gguf", "mmproj.gguf", "chat_template.jinja"]
    assert bundle.files["mmproj.gguf"].read_bytes() == projector.read_bytes()
    assert bundle.capabilities == {"chat", "completion", "audio"}
    with pytest.raises(InvalidModel, match="given as its projector has the architecture"):
        await puller.pull(LocalFiles(model, Extras(model)), lambda _: None, name="other")
    with pytest.raises(BadRequest) as caught:
        parse_extras("hf.co/a/b")
    assert caught.value.param == "mmproj"


async def test_a_template_for_a_folder(puller: Puller, store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", model_files() | {"chat_template.jinja": b"{{ messages }}"})
    (tmp_path / "t").write_text("{{ tools }}{{ tool_calls }}")
    await puller.pull(LocalFiles(folder, Extras(chat_template=tmp_path / "t")), lambda _: None, name="mine")
    assert store.bundle("mine").files["chat_template.jinja"].read_text() == "{{ tools }}{{ tool_calls }}"
    assert "tools" in store.bundle("mine").capabilities


async def test_a_folder_with_safetensors(puller: Puller, store: Store, tmp_path: Path) -> None:
    files = sharded() | {"1_Pooling/config.json": b"{}"}
    folder = write(tmp_path / "my model", files | {"README.md": b"#", "notes/x.json": b"{}", ".git/config.json": b"{}"})
    model = await puller.pull(LocalFiles(folder), lambda _: None, name="mine")
    assert store.get(model.id).config["format"] == "safetensors"
    assert {name: path.read_bytes() for name, path in store.bundle("mine").files.items()} == files
    assert list(store.partial.iterdir()) == []


@pytest.mark.parametrize("name", ["modeling.py", "pytorch_model.bin", "x.pt", "x.pth", "x.ckpt", "x.PKL", "sub/lib.so"])
async def test_a_folder_with_code_is_refused_unless_trusted(
    puller: Puller, store: Store, tmp_path: Path, name: str
) -> None:
    folder = write(tmp_path / "folder", model_files() | {name: b"code"})
    with pytest.raises(UnsupportedModel, match=f"carries code: '{name}'"):
        await puller.pull(LocalFiles(folder), lambda _: None, name="mine")
    assert store.list() == []
    await puller.pull(LocalFiles(folder), lambda _: None, name="mine", trust=True)
    assert set(store.bundle("mine").files) == set(model_files()) | ({name} if name.endswith(".py") else set())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), InvalidModel, "there is no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), InvalidModel, "no model in safetensors"),
        (lambda folder: os.truncate(folder / "model.safetensors", 20), InvalidModel, "truncated"),
        (lambda folder: _loop(folder / "tokenizer.json"), BadRequest, "cannot be read"),
        (lambda folder: _dangle(folder / "tokenizer.json"), ModelNotFound, "there is no file"),
    ],
)
async def test_folders_that_are_no_model(
    puller: Puller,
    store: Store,
    tmp_path: Path,
    change: Callable[[Path], None],
    error: type[ModelRunnerError],
    message: str,
) -> None:
    folder = write(tmp_path / "folder", model_files())
    change(folder)
    with pytest.raises(error, match=message):
        await puller.pull(LocalFiles(folder), lambda _: None, name="mine")
    assert store.list() == []


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 1234\n"


async def test_a_folder_of_pointers_is_no_model(puller: Puller, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text(POINTER if name == "model.safetensors" else "{}")
    with pytest.raises(InvalidModel, match="safetensors is a pointer of git-lfs"):
        await puller.pull(LocalFiles(tmp_path), lambda _: None, name="mine")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_fifo, BadRequest, "not a regular file"),
        (Path.mkdir, InvalidModel, "no model in safetensors"),
        (_link_to_device, BadRequest, "not a regular file"),
        (lambda path: None, ModelNotFound, "there is no file"),
        (lambda path: path.write_bytes(b"PK\3\4" * 100), InvalidModel, "does not begin with GGUF"),
        (lambda path: path.write_bytes(b""), InvalidModel, "does not begin with GGUF"),
        (lambda path: path.write_bytes(gguf()[:200]), InvalidModel, "invalid model"),
        (lambda path: path.write_text(POINTER), InvalidModel, "pointer of git-lfs"),
    ],
)
async def test_what_is_no_model_file_is_refused_at_once(
    puller: Puller, store: Store, tmp_path: Path, make: object, error: type[ModelRunnerError], message: str
) -> None:
    path = tmp_path / "m.gguf"
    assert callable(make)
    make(path)
    with pytest.raises(error, match=message):
        await puller.pull(LocalFiles(path), lambda _: None, name="mine")
    assert store.list() == []
    assert list(store.partial.rglob("*.gguf")) == []


@pytest.mark.parametrize(
    "text", ["file:///dev/zero", "file:///dev/null", "file:relative.gguf", "file://host/x", "file:///a%00b"]
)
async def test_devices_and_odd_texts(puller: Puller, text: str) -> None:
    with pytest.raises(BadRequest):
        await puller.pull(LocalFiles(path_of(text, "from")), lambda _: None, name="mine")


async def test_a_name_is_needed(puller: Puller) -> None:
    with pytest.raises(BadRequest, match="a name"):
        await puller.pull(LocalFiles(Path("/x.gguf")), lambda _: None)
