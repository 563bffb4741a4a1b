"""A small corpus, and helpers to play episodes."""

import asyncio
import json

import numpy as np

from rlds_jax.tasks.hotpotqa.passages import Passage
from rlds_jax.tasks.hotpotqa.retriever import Found

TEXTS = {
    "Mount Everest": "The highest mountain above sea level, in the Himalayas.",
    "Nile": "A river in Africa that flows north into the Mediterranean Sea.",
    "Photosynthesis": "Plants turn light, water and carbon dioxide into sugar.",
    "Ludwig van Beethoven": "German composer, born in Bonn in 1770, who went deaf.",
    "Bicycle": "A vehicle with two wheels that is driven by pedals.",
    "Honey bee": "An insect that makes honey and lives in colonies.",
    "Volcano": "An opening in the crust of a planet from which lava escapes.",
    "Chess": "A board game for two players with kings, queens and pawns.",
    "Penicillin": "The first antibiotic, found by Alexander Fleming in 1928.",
    "Iceland": "An island country in the North Atlantic; its capital is Reykjavik.",
}


def write_corpus(path, texts=TEXTS):
    lines = [
        json.dumps({"id": str(i), "contents": f'"{title}"\n{text}'})
        for i, (title, text) in enumerate(texts.items())
    ]
    path.write_text("".join(line + "\n" for line in lines))
    return path


class HashEncoder:
    """Unit vectors drawn from the text's hash: exact matches score 1, and nothing takes time."""

    dimension = 8

    def __init__(self, name="hash", salt=0):
        self.name, self.salt = name, salt

    def passages(self, texts):
        seeds = [[self.salt, *text.encode()] for text in texts]
        drawn = np.array([np.random.default_rng(s).normal(size=8) for s in seeds], np.float32)
        return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)

    queries = passages


class Shelf:
    """A retriever with scripted answers: passages, or an exception to raise."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def search(self, query, top_k):
        self.asked.append((query, top_k))
        answer = self.answers.pop(0) if self.answers else [Passage("0", "Nile", "A river.")]
        if isinstance(answer, Exception):
            raise answer
        return Found(tuple(answer), cached=len(self.asked) > 1)


def call(query, **arguments):
    body = {"name": "search", "arguments": {"query": query, **arguments}}
    return f"<tool_call>{json.dumps(body)}</tool_call>"


def play(environment, texts, restored=()):
    """The first observation and the results of the turns."""

    async def run():
        first = await environment.reset()
        if restored:
            await environment.restore(restored)
        results = []
        for text in texts:
            results.append(await environment.step(text))
            if results[-1].done:
                break
        await environment.close()
        return first, results

    return asyncio.run(run())
