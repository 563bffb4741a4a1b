"""Serves an index over HTTP; searches of all clients are done together.

    python -m rlds_jax.tasks.hotpotqa.serve --index=DIR [--port=8000] [--search_threads=1]

POST /retrieve takes either of two forms and answers in kind:

    {"queries": [str], "topk": int = 5, "return_scores": bool = false}
        -> {"result": [[{"document": {"id", "contents"}, "score"}]]}, or bare documents
    {"query": str, "top_k": int = 5} -> {"results": [{"id", "content", "score"}]}

GET /health tells the encoder and the number of passages. A request that does not hold is answered
with status 400 and {"error": ...}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from rlds_jax.tasks.hotpotqa.passages import Passage
from rlds_jax.tasks.hotpotqa.searcher import BatchedSearch, Searcher

MAX_TOP_K = 100
MAX_QUERIES = 1024
_BODY_BYTES = 8 * 2**20


class BadRequest(ValueError):
    """What was wrong with a request, by field."""


def make_app(searcher: Searcher, max_batch: int = 256) -> web.Application:
    """The server of an index; it closes the searcher when it ends."""
    search = BatchedSearch(searcher, max_batch)
    manifest = searcher.manifest

    async def retrieve(request: web.Request) -> web.Response:
        try:
            body = await request.json()
            if isinstance(body, dict) and "queries" in body:
                return web.json_response(await _many(search, body))
            if isinstance(body, dict) and "query" in body:
                return web.json_response(await _one(search, body))
            raise BadRequest('the body must be a JSON object with "queries" or "query"')
        except (BadRequest, json.JSONDecodeError, UnicodeDecodeError) as error:
            return web.json_response({"error": str(error)}, status=400)

    async def health(_: web.Request) -> web.Response:
        fields = {"encoder": manifest.encoder, "passages": manifest.count, "faiss": manifest.faiss}
        return web.json_response({"status": "ok", **fields})

    async def close(_: web.Application) -> None:
        await search.close()

    app = web.Application(client_max_size=_BODY_BYTES)
    app.add_routes([web.post("/retrieve", retrieve), web.get("/health", health)])
    app.on_cleanup.append(close)
    return app


async def _many(search: BatchedSearch, body: dict[str, Any]) -> dict[str, Any]:
    queries = body["queries"]
    if not isinstance(queries, list) or not 1 <= len(queries) <= MAX_QUERIES:
        raise BadRequest(f"queries must be a list of 1 to {MAX_QUERIES} strings")
    top_k = _size(body, "topk")
    texts = [_text(query, "queries") for query in queries]
    found = await asyncio.gather(*(search.search(text, top_k) for text in texts))
    scored = bool(body.get("return_scores", False))
    return {"result": [[_document(passage, scored) for passage in row] for row in found]}


async def _one(search: BatchedSearch, body: dict[str, Any]) -> dict[str, Any]:
    found = await search.search(_text(body["query"], "query"), _size(body, "top_k"))
    return {"results": [{"id": p.id, "content": p.contents, "score": p.score} for p in found]}


def _document(passage: Passage, scored: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": passage.contents}
    return {"document": document, "score": passage.score} if scored else document


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRequest(f"{field} must hold a string that is not empty")
    return value.encode("utf-8", "replace").decode()


def _size(body: dict[str, Any], field: str) -> int:
    size = body.get(field)
    size = 5 if size is None else size
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_TOP_K:
        raise BadRequest(f"{field} must be an integer from 1 to {MAX_TOP_K}")
    return size


async def _run(app: web.Application, host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT; requests in flight are answered first."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        address = runner.addresses[0]
        print(f"serving on http://{address[0]}:{address[1]}", flush=True)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
    finally:
        await runner.cleanup()


def main() -> None:
    from rlds_jax.tasks.hotpotqa.sentence_e5 import make_encoder

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", type=Path, required=True, help="directory of the index command")
    parser.add_argument("--encoder", help="where the index's own encoder is, if not at its name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument("--max_batch", type=int, default=256, help="queries searched together")
    parser.add_argument("--search_threads", type=int, default=1, help="OpenMP threads of a search")
    parser.add_argument("--nprobe", type=int, help="clusters read of an IVF index")
    flags = parser.parse_args()
    try:
        searcher = Searcher(
            flags.index,
            lambda name: make_encoder(flags.encoder or name),
            flags.search_threads,
            flags.nprobe,
        )
        asyncio.run(_run(make_app(searcher, flags.max_batch), flags.host, flags.port))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
