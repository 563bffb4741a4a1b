"""Passages from a retrieval server, ours or any that speaks one of its two forms."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Literal

import aiohttp

from rlds_jax.tasks.hotpotqa.passages import Passage
from rlds_jax.tasks.hotpotqa.retriever import RetrievalError

Form = Literal["queries", "query"]

_TRANSIENT = (429, 500, 502, 503, 504)
_FIRST_PAUSE = 0.5  # seconds before the first retry, doubled for each further one


class HttpSource:
    """POSTs searches to `<url>/retrieve`, over connections that are kept. For one event loop.

    Args:
      url: of the server, without "/retrieve".
      form: "queries" sends {"queries", "topk", "return_scores"} as Search-R1 does, "query" sends
        {"query", "top_k"}.
      timeout: seconds for one try.
      tries: of one search; timeouts, lost connections and statuses 429 and 5xx are tried again.
      connections: most at once.
    """

    def __init__(
        self,
        url: str,
        form: Form = "queries",
        timeout: float = 30.0,
        tries: int = 3,
        connections: int = 64,
    ):
        self._url = url.rstrip("/") + "/retrieve"
        self._form = form
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._tries = tries
        # Waiting for a connection must not count against the timeout, as aiohttp's own pool does.
        self._connections = asyncio.Semaphore(connections)
        self._session: aiohttp.ClientSession | None = None

    async def search(self, query: str, top_k: int) -> tuple[Passage, ...]:
        """The best passages, best first.

        Raises:
          RetrievalError: every try failed, or the answer is not of the form.
        """
        if self._form == "queries":
            body = {"queries": [query], "topk": top_k, "return_scores": True}
        else:
            body = {"query": query, "top_k": top_k}
        answer = await self._post(body)
        try:
            if self._form == "queries":
                found = [_document(entry) for entry in answer["result"][0]]
            else:
                found = [_result(entry) for entry in answer["results"]]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise RetrievalError(
                f"{self._url} answered in another form than {self._form!r} ({error!r}); set "
                "task.options.retriever_form"
            ) from error
        return tuple(found[:top_k])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _post(self, body: dict[str, Any]) -> Any:
        """The answer's JSON, tried again after failures that may pass."""
        for left in reversed(range(self._tries)):
            try:
                return await self._try(body)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                status = getattr(error, "status", None)
                passing = status in _TRANSIENT or not isinstance(
                    error, aiohttp.ClientResponseError | ValueError
                )
                if not left or not passing:
                    reason = str(error) or type(error).__name__
                    raise RetrievalError(f"{self._url}: {reason}") from error
            pause = _FIRST_PAUSE * 2 ** (self._tries - 1 - left)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable: the last try returns or raises")

    async def _try(self, body: dict[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        post = self._session.post(self._url, json=body, timeout=self._timeout)
        async with self._connections, post as response:
            if response.status >= 400:
                text = (await response.text())[:200]
                raise aiohttp.ClientResponseError(
                    response.request_info, (), status=response.status, message=text
                )
            return await response.json(content_type=None)


def _document(entry: dict[str, Any]) -> Passage:
    document = entry.get("document", entry)
    score = float(entry.get("score", 0.0))
    return Passage.from_contents(str(document.get("id", "")), document["contents"], score)


def _result(entry: dict[str, Any]) -> Passage:
    score = float(entry.get("score", 0.0))
    return Passage.from_contents(str(entry.get("id", "")), entry["content"], score)
