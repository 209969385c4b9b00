"""Compares the vocabularies of two models: a model and its draft model must share one."""

from modelrunner.store.gguf import read_strings
from modelrunner.types import Bundle, ModelFormat

# llama.cpp's limits (common/speculative.cpp): the larger vocabulary may have that many words more, and the first words,
# marks of beginning and end, may have other names.
MOST_MORE = 128
FIRST_COMPARED = 5
_TOKENS = "tokenizer.ggml.tokens"
_MARKS = {"bos": "beginning", "eos": "end"}


def difference(model: Bundle, draft: Bundle) -> str:
    """Returns the reason, in a few words, why `draft` cannot draft for `model`; "" if it can. Reads both vocabularies:
    a tenth of a second for large ones. Raises `InvalidModel`."""
    if model.format is not draft.format:
        return f"it is a {draft.format} model and not a {model.format} one"
    if model.format is not ModelFormat.GGUF:
        return ""  # the engine decides
    return _different_marks(model, draft) or _different_words(model, draft)


def _different_marks(model: Bundle, draft: Bundle) -> str:
    mine, other = model.header.metadata, draft.header.metadata
    kind = "tokenizer.ggml.model"
    if mine.get(kind) != other.get(kind):
        return f"it has another kind of tokenizer ({other.get(kind)}, not {mine.get(kind)})"
    for mark, place in _MARKS.items():
        added, name = f"tokenizer.ggml.add_{mark}_token", f"tokenizer.ggml.{mark}_token_id"
        adds = {
            header[added] for header in (mine, other) if added in header
        }  # without the entry the engine decides for both
        if len(adds) > 1 or (adds == {True} and mine.get(name) != other.get(name)):
            return f"it marks the {place} of a text differently"
    return ""


def _different_words(model: Bundle, draft: Bundle) -> str:
    mine, other = read_strings(model.model_file, _TOKENS), read_strings(draft.model_file, _TOKENS)
    if abs(len(mine) - len(other)) > MOST_MORE:
        return f"it has another vocabulary ({len(other)} words, not {len(mine)})"
    for number, (word, drafted) in enumerate(zip(mine, other, strict=False)):
        if word != drafted and number >= FIRST_COMPARED:
            return f"it has another vocabulary (word {number} is {_shown(drafted)}, not {_shown(word)})"
    return ""


def _shown(word: bytes) -> str:
    return repr(word[:40].decode("utf-8", "replace"))
