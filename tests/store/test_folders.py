"""Models in safetensors, in the store: what is read out of a folder, and what is no model."""

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from modelrunner.errors import InvalidModel, UnsupportedModel
from modelrunner.store import Store
from modelrunner.store.digests import Digest
from modelrunner.store.manifests import decode
from modelrunner.store.mediatypes import CONFIG_TYPE, FILE_TYPE, SAFETENSORS_TYPE
from modelrunner.types import ModelFormat
from tests.store.folders import CONFIG, add_folder, model_files, sharded, weights, write
from tests.store.samples import files_under


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "data")


def test_a_model_is_described_by_its_config(store: Store) -> None:
    files = model_files(rope_scaling={"type": "yarn", "factors": [1, 2.5]}, empty=None, tie=True, objects=[{}])
    model = add_folder(store, "mine", files)
    config = dict(model.config)
    shown = config.pop("safetensors")
    assert config == {
        "format": "safetensors",
        "quantization": "F16",
        "parameters": "8",
        "architecture": "LlamaForCausalLM",
        "size": model.config["size"],
        "context_size": 2048,
    }
    assert shown["rope_scaling.type"] == "yarn"
    assert (shown["tie"], shown["objects.length"]) == ("true", "1")
    bundle = store.bundle("mine")
    assert bundle.format is ModelFormat.SAFETENSORS
    assert bundle.header.metadata["rope_scaling.factors"] == [1, 2.5]
    assert "empty" not in bundle.header.metadata
    assert [tensor.name for tensor in bundle.header.tensors] == ["a", "b"]


def test_the_bundle_is_the_folder(store: Store) -> None:
    files = model_files() | {"1_Pooling/config.json": b"{}", "modules.json": b"[]", "chat_template.jinja": b"x"}
    add_folder(store, "mine", files)
    bundle = store.bundle("mine")
    assert bundle.model_file.name == "config.json"
    assert {name: path.read_bytes() for name, path in bundle.files.items()} == files
    assert {str(path.relative_to(bundle.directory)) for path in bundle.files.values()} == set(files)
    assert bundle.size == sum(map(len, files.values()))


def test_it_is_the_same_after_a_restart_and_without_its_bundle(store: Store) -> None:
    add_folder(store, "mine", model_files() | {"1_Pooling/config.json": b"{}"})
    bundle = store.bundle("mine")
    assert Store(store.data).bundle("mine") == bundle
    bundle.files["1_Pooling/config.json"].unlink()
    bundle.files["1_Pooling/config.json"].parent.rmdir()
    (bundle.directory / "header").unlink()
    (bundle.directory / "1_Pooling.tmp").mkdir()
    assert Store(store.data).bundle("mine") == bundle
    assert bundle.files["1_Pooling/config.json"].read_bytes() == b"{}"


def test_leftovers_of_making_a_bundle_are_swept(store: Store) -> None:
    add_folder(store, "mine", model_files() | {"1_Pooling/config.json": b"{}"})
    leftover = store.data / "bundles" / ".config.json.0123.tmp"
    leftover.touch()
    Store(store.data)
    assert not leftover.exists()


def test_removing_it_leaves_nothing(store: Store) -> None:
    add_folder(store, "mine", model_files() | {"1_Pooling/config.json": b"{}"})
    store.remove("mine")
    assert set(files_under(store.data)) == {"format"}


def test_a_finetune_shares_its_tokenizer(store: Store) -> None:
    add_folder(store, "a", model_files(seed=1))
    add_folder(store, "b", model_files(seed=2))
    usage, total, *_ = store.disk_usage()
    assert [entry.shared for entry in usage] == [len(model_files()["config.json"]) + 2] * 2
    assert total == sum(entry.size for entry in usage) - usage[0].shared


def test_the_layers_have_dockers_media_types(store: Store) -> None:
    model = add_folder(store, "mine", model_files())
    manifest = json.loads((store.data / "manifests/sha256" / model.id[7:]).read_bytes())
    assert {layer["mediaType"] for layer in manifest["layers"]} == {SAFETENSORS_TYPE, FILE_TYPE}


def test_shards_need_their_index(store: Store) -> None:
    model = add_folder(store, "mine", sharded())
    assert model.config["parameters"] == "8"
    assert [tensor.name for tensor in store.bundle("mine").header.tensors] == ["a", "b"]


INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"


def index(**places: str) -> bytes:
    return json.dumps({"weight_map": places}).encode()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({INDEX: None}, "2 weight files but lacks"),
        ({SECOND: None}, f"{SECOND} is missing"),
        ({INDEX: b"[]"}, "not a JSON object"),
        ({INDEX: b"{}"}, "no weight_map"),
        ({INDEX: index(a=SECOND, b=SECOND)}, "disagree"),
        ({INDEX: index(a="../../etc/passwd")}, "is missing"),
        ({SECOND: weights("a", "b")}, "disagree"),
        ({SECOND: weights("b", "c")}, "disagree"),
    ],
)
def test_shards_and_index_must_agree(store: Store, changes: dict[str, bytes | None], match: str) -> None:
    files = {name: data for name, data in (sharded() | changes).items() if data is not None}
    with pytest.raises(InvalidModel, match=match):
        add_folder(store, "mine", files)
    assert store.list() == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"config.json": None}, "there is no config.json"),
        ({"config.json": b"{"}, "not valid JSON"),
        ({"config.json": b"[" * 100_000}, "not valid JSON"),
        ({"config.json": b"\xff\xfe{\0}\0"}, "not valid JSON"),
        ({"config.json": b" " * (5 << 20)}, "over 4 MiB"),
        ({"config.json": b'{"architectures": []}'}, "its architecture is missing"),
        ({"config.json": b'{"architectures": [1]}'}, "its architecture is missing"),
        ({"model.safetensors": None}, "no safetensors file with tensors"),
        ({"model.safetensors": weights()}, "no safetensors file with tensors"),
        ({"model.safetensors": weights("a")[:-1]}, "truncated"),
        ({"../escape.json": b"{}"}, "not part of a model"),
        ({"deep/config.json": b"{}"}, "not part of a model"),
        ({"header": b""}, "not part of a model"),
        ({"Tokenizer.json": b""}, "differ in case only"),
    ],
)
def test_only_a_whole_model_is_stored(store: Store, changes: dict[str, bytes | None], match: str) -> None:
    files = {name: data for name, data in (model_files() | changes).items() if data is not None}
    with pytest.raises(InvalidModel, match=match):
        add_folder(store, "mine", files)
    assert store.list() == []


AUTO_MAP: dict[str, Any] = {"auto_map": {"AutoModel": "modeling.Evil"}}


@pytest.mark.parametrize(
    "files",
    [
        model_files(**AUTO_MAP),
        model_files(text_config=AUTO_MAP),
        model_files() | {"tokenizer_config.json": json.dumps(AUTO_MAP).encode()},
        model_files() | {"1_Pooling/config.json": json.dumps(AUTO_MAP).encode()},
        model_files() | {"modules.json": b'[{"type": "evil.Module"}]'},
        model_files() | {"modeling.py": b"raise SystemExit"},
    ],
)
def test_code_is_refused_unless_trusted(store: Store, files: dict[str, bytes]) -> None:
    with pytest.raises(UnsupportedModel, match=r"carries code.*--trust-remote-code"):
        add_folder(store, "mine", files)
    assert store.list() == []
    add_folder(store, "mine", files, trust=True)
    assert store.bundle("mine").brings_code
    assert set(store.bundle("mine").files) == set(files)


def test_a_word_of_a_vocabulary_is_not_code(store: Store) -> None:
    add_folder(store, "mine", model_files() | {"vocab.json": b'{"auto_map": 1}', "tokenizer.json": b'{"auto_map": 1}'})


@pytest.mark.parametrize(
    ("config", "extra", "capabilities"),
    [
        ({}, {}, {"completion"}),
        ({"architectures": ["GPT2LMHeadModel"]}, {}, {"completion"}),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"depth": 1}},
            {},
            {"completion", "vision"},
        ),
        (
            {"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {"depth": 1}},
            {},
            {"completion", "audio"},
        ),
        (
            {"architectures": ["XForConditionalGeneration"]},
            {"preprocessor_config.json": b'{"image_processor_type": "A", "feature_extractor_type": "B"}'},
            {"completion", "vision", "audio"},
        ),
        ({}, {"chat_template.jinja": b"{{ tools }}{{ tool_calls }}"}, {"chat", "completion", "tools"}),
        (
            {},
            {
                "chat_template.jinja": b"{{ messages }}",
                "tokenizer_config.json": b'{"chat_template": "{{ tools }}{{ tool_calls }}"}',
            },
            {"chat", "completion"},
        ),
        (
            {},
            {"tokenizer_config.json": b'{"chat_template": "{{ tools }}{{ tool_calls }}"}'},
            {"chat", "completion", "tools"},
        ),
        (
            {},
            {"tokenizer_config.json": b'{"chat_template": [{"name": "a", "template": "{{ enable_thinking }}"}]}'},
            {"chat", "completion", "reasoning"},
        ),
        ({"architectures": ["BertModel"]}, {"chat_template.jinja": b"{{ tools }}{{ tool_calls }}"}, {"embedding"}),
        ({"architectures": ["BertModel"]}, {}, {"embedding"}),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"modules.json": b"[]"}, {"embedding"}),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x"}}, {}, {"reranking"}),
        ({"architectures": ["BertForSequenceClassification"], "num_labels": 1}, {}, {"reranking"}),
        ({"architectures": ["BertForSequenceClassification"]}, {}, {"classification"}),
        ({"architectures": ["Unheard"]}, {}, set()),
    ],
)
def test_capabilities(store: Store, config: dict[str, Any], extra: dict[str, bytes], capabilities: set[str]) -> None:
    add_folder(store, "mine", model_files(**config) | extra)
    assert store.bundle("mine").capabilities == capabilities


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, 2048),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": None, "n_positions": 1024}, 1024),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_context_length(store: Store, config: dict[str, Any], length: int | None) -> None:
    model = add_folder(store, "mine", model_files(**config))
    assert store.bundle("mine").context_length == length
    assert model.config.get("context_size") == length


def test_a_quantized_model_says_how(store: Store) -> None:
    model = add_folder(store, "mine", model_files(quantization_config={"quant_method": "awq", "bits": 4}))
    assert model.config["quantization"] == "AWQ"


@pytest.mark.parametrize("name", ["model.gguf", "a/b.json", "x.sh", "/x.json", "../x.json", "README.md", "weights.bin"])
def test_a_file_with_no_name_of_a_models_file_stays_out(name: str) -> None:
    layers = [layer(FILE_TYPE, "config.json", "0"), layer(FILE_TYPE, name, "1")]
    data = json.dumps({"schemaVersion": 2, "config": layer(CONFIG_TYPE, "", "2"), "layers": layers}).encode()
    contents = decode(data, Digest.of(data))
    assert list(contents.files) == ["config.json"]
    assert [str(file.digest) for file in contents.others] == [layers[1]["digest"]]


def layer(media_type: str, name: str, digit: str) -> dict[str, Any]:
    annotations = {"org.cncf.model.filepath": name}
    return {"mediaType": media_type, "digest": f"sha256:{digit * 64}", "size": 1, "annotations": annotations}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "123456789012345678901234567890", "1e999"])
def test_numbers_that_only_python_writes_are_taken(store: Store, number: str) -> None:
    config = json.dumps(dict(CONFIG)).replace("{", f'{{"time_step_limit": [0.0, {number}], "other": {number}, ', 1)
    model = add_folder(store, "mine", model_files() | {"config.json": config.encode()})
    assert model.config["architecture"] == "LlamaForCausalLM"
    assert Store(store.data).bundle("mine").context_length == 2048
    msgspec.json.encode(model)


@pytest.mark.parametrize(
    "extra",
    [
        {"k" * 1_000_000: {str(n): n for n in range(100_000)}},
        {"k" * 1_000_000: {"l" * 500_000: {"m" * 500_000: {str(n): {} for n in range(100_000)}}}},
        {str(n): "x" * 60_000 for n in range(60)},
        {str(n): [0] * 4000 for n in range(250)},
        {str(n): [] for n in range(300_000)},
    ],
)
def test_what_is_kept_of_a_configuration_is_bounded(store: Store, extra: dict[str, Any]) -> None:
    """Measured in a child that may take 250 MB more than it has after its imports, and which the file would need."""
    write(store.partial, model_files(**extra))
    lines = (
        "import resource, sys",
        "from pathlib import Path",
        "from modelrunner.errors import InvalidModel",
        "from modelrunner.store import safetensors_model",
        "held = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()",
        "resource.setrlimit(resource.RLIMIT_AS, (held + (250 << 20),) * 2)",
        "paths = {path.name: path for path in Path(sys.argv[1]).iterdir()}",
        "try: print(len(safetensors_model.read(paths).header.metadata))",
        "except InvalidModel as error: print(error.message)",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(store.partial)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    if len(extra) < 200:
        assert "more than 8 MiB" in outcome.stdout or outcome.stdout.strip().isdigit()


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"config.json": json.dumps(dict(CONFIG) | {"num_hidden_layers": 10**9}).encode()}, "more than any model has"),
        ({"config.json": json.dumps({"architectures": ["A" * 10_000]}).encode()}, "10000 characters"),
        ({"chat_template.jinja": b"x" * 200_000}, "chat template"),
        ({"tokenizer_config.json": json.dumps({"chat_template": "x" * 200_000}).encode()}, "chat template"),
        (
            {"tokenizer_config.json": json.dumps({"chat_template": [{"template": "x" * 200_000}]}).encode()},
            "chat template",
        ),
        ({"config.json": b'{"architectures": ["A"], "x": "\\ud800"}'}, "not valid JSON"),
    ],
)
def test_figures_that_no_model_has(store: Store, files: dict[str, bytes], match: str) -> None:
    with pytest.raises(InvalidModel, match=match):
        add_folder(store, "mine", model_files() | files)


def test_what_is_shown_of_a_model_is_short(store: Store) -> None:
    model = add_folder(store, "mine", model_files(0, **{f"key{n}": "x" * 1000 for n in range(3000)}))
    assert len(msgspec.json.encode(model)) < 100_000


def test_a_model_without_code_brings_none(store: Store) -> None:
    add_folder(store, "plain", model_files())
    assert not store.bundle("plain").brings_code
