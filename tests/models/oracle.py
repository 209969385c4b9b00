"""What a BERT computes, in numpy, from the safetensors file itself: the vectors and scores that a converted model must
come near to. The formulas are those of the paper (Devlin et al., 2018)."""

import json
import math
from pathlib import Path

import numpy as np

from tests.models import safetensors

_erf = np.vectorize(math.erf)


class Bert:
    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        tensors = safetensors.read(folder / "model.safetensors")
        self._tensors = {name.removeprefix("bert."): array for name, array in tensors.items()}
        self._vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]

    def tokens(self, *texts: str) -> list[int]:
        """Of lower-case words without accents: the longest piece first, and marks around each text."""
        found = [self._vocabulary["[CLS]"]]
        for text in texts:
            for word in text.split():
                found += self._pieces(word)
            found.append(self._vocabulary["[SEP]"])
        return found

    def _pieces(self, word: str) -> list[int]:
        pieces, mark = [], ""
        while word:
            length = next(n for n in range(len(word), 0, -1) if mark + word[:n] in self._vocabulary)
            pieces.append(self._vocabulary[mark + word[:length]])
            word, mark = word[length:], "##"
        return pieces

    def embed(self, text: str) -> np.ndarray:
        """The mean over all tokens, of length 1."""
        mean = self._states(self.tokens(text)).mean(axis=0)
        return np.asarray(mean / np.linalg.norm(mean))

    def score(self, query: str, document: str) -> float:
        first = self._states(self.tokens(query, document))[0]
        return float(self._linear(np.tanh(self._linear(first, "pooler.dense")), "classifier")[0])

    def _states(self, tokens: list[int]) -> np.ndarray:
        """A vector for each token."""
        embeddings = {part: self._tensors[f"embeddings.{part}_embeddings.weight"] for part in ("word", "position")}
        x = embeddings["word"][tokens] + embeddings["position"][: len(tokens)]
        x = self._norm(x + self._tensors["embeddings.token_type_embeddings.weight"][0], "embeddings")
        for number in range(self._config["num_hidden_layers"]):
            layer = f"encoder.layer.{number}"
            attended = self._linear(self._attention(x, f"{layer}.attention.self"), f"{layer}.attention.output.dense")
            x = self._norm(x + attended, f"{layer}.attention.output")
            inner = self._linear(x, f"{layer}.intermediate.dense")
            inner = inner * 0.5 * (1 + _erf(inner / math.sqrt(2)))  # GELU
            x = self._norm(x + self._linear(inner, f"{layer}.output.dense"), f"{layer}.output")
        return np.asarray(x)

    def _attention(self, x: np.ndarray, name: str) -> np.ndarray:
        heads = self._config["num_attention_heads"]
        query, key, value = (
            self._linear(x, f"{name}.{part}").reshape(len(x), heads, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        weights = np.exp(query @ key.swapaxes(1, 2) / math.sqrt(query.shape[2]))
        weights /= weights.sum(axis=2, keepdims=True)
        return np.asarray((weights @ value).swapaxes(0, 1).reshape(x.shape))

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x @ self._tensors[f"{name}.weight"].T + self._tensors[f"{name}.bias"])

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale, shift = (self._tensors[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        spread = np.sqrt(x.var(axis=-1, keepdims=True) + self._config["layer_norm_eps"])
        return np.asarray((x - x.mean(axis=-1, keepdims=True)) / spread * scale + shift)
