"""What an index directory says of itself, and the files in it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
PASSAGES = "passages.jsonl"  # lines of the corpus, as they were
OFFSETS = "offsets.u64"  # where each line ends
VECTORS = "vectors.f32"  # while building only
FAISS = "index.faiss"
PROGRESS = "progress.json"  # while building only


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Describes a finished index.

    Attributes:
      corpus: size and checksum of the start of the file it was made of.
      encoder: name of what encoded it; queries need the same.
      probe: that encoder's vector of `encoders.PROBE`, by which another one is recognised.
      faiss: index factory string.
      count, dimension: of the vectors.
      passages_bytes, faiss_bytes: sizes of the files.
      passages_sha256, faiss_sha256: their checksums.
    """

    corpus: str
    encoder: str
    probe: tuple[float, ...]
    faiss: str
    count: int
    dimension: int
    passages_bytes: int
    faiss_bytes: int
    passages_sha256: str
    faiss_sha256: str

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a directory whose files have the sizes it says.

        Raises:
          ValueError: there is none, or it does not fit the directory.
        """
        path = directory / MANIFEST
        remedy = "build it with python -m rlds_jax.tasks.hotpotqa.index"
        if not path.is_file():
            raise ValueError(f"{directory} holds no finished index ({MANIFEST}); {remedy}")
        try:
            fields = json.loads(path.read_text())
            manifest = cls(**{**fields, "probe": tuple(fields["probe"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged ({error!r}); remove it and {remedy}") from error
        sizes = ((PASSAGES, manifest.passages_bytes), (FAISS, manifest.faiss_bytes))
        for name, wanted in (*sizes, (OFFSETS, 8 * manifest.count)):
            found = (directory / name).stat().st_size if (directory / name).is_file() else None
            if found != wanted:
                raise ValueError(
                    f"{directory / name} has {found} bytes, its manifest says {wanted}: the copy "
                    f"is incomplete; copy the directory again, or remove it and {remedy}"
                )
        return manifest

    def verify(self, directory: Path) -> None:
        """Reads the files and compares their checksums.

        Raises:
          ValueError: one differs.
        """
        for name, wanted in ((PASSAGES, self.passages_sha256), (FAISS, self.faiss_sha256)):
            if sha256(directory / name) != wanted:
                raise ValueError(f"{directory / name} is damaged: its checksum differs")

    def write(self, directory: Path) -> None:
        write_json(directory / MANIFEST, dataclasses.asdict(self))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Replaces the file as a whole: a reader sees the old content or the new."""
    draft = path.with_suffix(".tmp")
    with draft.open("w") as file:
        json.dump(fields, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
