"""Runtime flags: ordinary ones pass, whatever could reach past the daemon does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from modelrunner.errors import BadRequest
from modelrunner.sdk.flags import words_of
from modelrunner_llamacpp import args, flags
from modelrunner_llamacpp.flags import ALLOWED, OPTIONS, OWNED
from modelrunner_llamacpp.model_options import LlamaCppOptions
from modelrunner_llamacpp.settings import LlamaCppSettings


@pytest.mark.parametrize(
    ("words", "parsed"),
    [
        ((), {}),
        (("--temp", "0.7", "--top-k", "20"), {"--temp": "0.7", "--top-k": "20"}),
        (("-c", "4096", "-ngl", "all"), {"--ctx-size": "4096", "--n-gpu-layers": "all"}),
        (("--seed", "-1", "--presence-penalty", "-1.5"), {"--seed": "-1", "--presence-penalty": "-1.5"}),
        (("--no-kv-offload", "--swa-full"), {"--kv-offload": "off", "--swa-full": "on"}),
        (("-fa", "on", "-ctk", "q8_0"), {"--flash-attn": "on", "--cache-type-k": "q8_0"}),
        (("--tensor-split", "3,1"), {"--tensor-split": "3,1"}),
        (("--samplers", "top_k;temperature"), {"--samplers": "top_k;temperature"}),
        (("--no-mmap",), {"--load-mode": "none"}),
        (("--temp", "1", "--temp", "2"), {"--temp": "2"}),
    ],
)
def test_ordinary_flags_pass(words: tuple[str, ...], parsed: dict[str, str]) -> None:
    assert flags.parse(words) == parsed


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--temp=0.7",), "--temp"),
        (("--temperatur", "0.7"), "--temperatur"),
        (("--ctx", "512"), "--ctx"),
        (("--verbose",), "--verbose"),
        (("/etc/passwd",), "/etc/passwd"),
        (("--swa-full", "true"), "true"),
        (("--temp",), "--temp"),
        (("--temp", ""), "--temp"),
        (("--temp", "--top-k", "20"), "--temp"),
        (("--temp", "nan"), "--temp"),
        (("--temp", "inf"), "--temp"),
        (("--temp", "1_0"), "--temp"),
        (("--temp", "-1"), "--temp"),
        (("--top-k", "1.5"), "--top-k"),
        (("--top-k", "٣"), "--top-k"),
        (("--ctx-size", "9" * 5000), "--ctx-size"),
        (("--ctx-size", "0"), "--ctx-size"),
        (("--parallel", "-1"), "--parallel"),
        (("--cache-type-k", "q2_K"), "--cache-type-k"),
        (("--tensor-split", "1,,2"), "--tensor-split"),
        (("--tensor-split", "1,nan"), "--tensor-split"),
        (("--samplers", "top_k;rm"), "--samplers"),
        (("--chat-template", "{{ x }}"), "--chat-template"),
        (("",), "''"),
        (("-",), "'-'"),
        (("--",), "'--'"),
    ],
)
def test_others_are_refused_by_name(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(BadRequest) as caught:
        flags.parse(words)
    assert named in caught.value.message
    assert caught.value.param == "runtime-flags"


@pytest.mark.parametrize(
    "flag",
    [
        *("--model", "-m", "--host", "--port", "--api-key", "--log-file", "--slots", "--no-slots", "--props"),
        *("--metrics", "--alias", "-a", "--mmproj", "--rpc", "--hf-repo", "--slot-save-path", "--media-path"),
        *("--tools", "--embeddings", "--reranking", "--webui", "--model-draft", "--offline"),
    ],
)
@pytest.mark.parametrize("form", [("{}",), ("{}", "x"), ("{}=x",)])
def test_what_the_daemon_owns_cannot_be_given(flag: str, form: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest, match=f"{flag} (is set by modelrunner|cannot be given)"):
        flags.parse([word.format(flag) for word in form])


@given(st.lists(st.one_of(st.sampled_from([o.flag for o in ALLOWED]), st.text(max_size=8), st.integers().map(str))))
def test_only_known_flags_with_checked_values_come_out(words: list[str]) -> None:
    try:
        parsed = flags.parse(words)
    except BadRequest:
        return
    assert not parsed.keys() & {option.flag for option in OWNED}
    for flag, text in parsed.items():
        OPTIONS[flag].kind.check(text)
        OPTIONS[flag].attribute_value(text)
        assert words_of(OPTIONS[flag], text)


def test_no_spelling_means_two_things() -> None:
    names = [name for option in (*ALLOWED, *OWNED) for name in (option.flag, *option.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("words", "fields", "rest"),
    [
        ((), {}, ()),
        (("-fa", "on"), {}, ("-fa", "on")),
        (("-c", "4096", "--top-k", "20"), {"context_size": 4096}, ("--top-k", "20")),
        (("-np", "2", "-ngl", "7"), {"parallel": 2, "gpu_layers": 7}, ()),
        (("--gpu-layers", "auto"), {"gpu_layers": None}, ()),
        (("--n-gpu-layers", "all", "--no-kv-offload"), {"gpu_layers": 10_000}, ("--no-kv-offload",)),
        (("-c", "1", "--ctx-size", "2"), {"context_size": 2}, ()),
    ],
)
def test_flags_that_are_fields_leave_the_others(
    words: tuple[str, ...], fields: dict[str, int | None], rest: tuple[str, ...]
) -> None:
    assert flags.fold(words) == (fields, rest)


@given(st.permutations([("-c", "512"), ("-np", "3"), ("--top-k", "20"), ("--swa-full",), ("--no-kv-offload",)]))
def test_folding_loses_nothing(order: list[tuple[str, ...]]) -> None:
    words = tuple(word for group in order for word in group)
    fields, rest = flags.fold(words)
    again = flags.parse(rest) | {"--ctx-size": str(fields["context_size"]), "--parallel": str(fields["parallel"])}
    assert again == flags.parse(words)
    assert flags.fold(rest) == ({}, rest)


@pytest.mark.parametrize(("model", "key"), [(LlamaCppSettings, "slot_cache"), (LlamaCppOptions, "prompt-cache")])
def test_a_size_that_is_none_is_named(model: type[BaseModel], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({key: "much"})
    assert [fault["loc"] for fault in caught.value.errors()] == [(key,)]


@pytest.mark.parametrize(
    ("word", "helps"),
    [
        ("--kv-unified", "every sequence has a context of its own"),
        ("--lora", "configure MODEL --lora PATH"),
        ("--grammar-file", "a request brings its own"),
        ("--chat-template-file", "configure MODEL --chat-template FILE"),
        ("--mmproj", "a part of the model"),
        ("--model-draft", "--draft-model"),
        ("--ctx-siz", "did you mean --ctx-size?"),
        ("--top-kk", "did you mean --top-k"),
        ("--nonsense", "docs/configuration.md"),
    ],
)
def test_a_refusal_says_what_to_do_instead(word: str, helps: str) -> None:
    for form in ((word, "x"), (f"{word}=x",)):
        with pytest.raises(BadRequest) as caught:
            flags.parse(form)
        assert word in caught.value.message
        assert helps in caught.value.message


def test_where_experts_lie_is_the_same_for_both_engines() -> None:
    words = ("--n-cpu-moe", "2", "-ot", "blk.7.*exps=CPU")
    parsed = flags.parse(words)
    native = [word for flag, text in parsed.items() for word in words_of(OPTIONS[flag], text)]
    assert native == ["--n-cpu-moe", "2", "--override-tensor", "blk.7.*exps=CPU"]
    pattern = r"ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
    wheel = args.attributes(parsed)["attributes"]["tensor_buft_overrides"]
    assert wheel == rf"blk\.0\.{pattern},blk\.1\.{pattern},blk.7.*exps=CPU"
    assert args.attributes(flags.parse(["--cpu-moe"]))["attributes"]["tensor_buft_overrides"] == rf"\.{pattern}"


@pytest.mark.parametrize("text", ["exps", "=CPU", "exps=/dev/x", "a=CPU,b", "exps=CUDA0 --model x", "a b=CPU"])
def test_overrides_name_buffers_and_nothing_else(text: str) -> None:
    with pytest.raises(BadRequest, match="--override-tensor takes PATTERN=BUFFER"):
        flags.parse(["--override-tensor", text])
