"""The tiny policy of configs/hotpotqa.py:tiny."""

from __future__ import annotations

import random
import types
from collections.abc import Iterable, Iterator, Sequence

from ml_collections import ConfigDict

from configs.hotpotqa import get_config
from experiments.tiny_policy.hotpotqa import critics
from experiments.tiny_policy.hotpotqa.critics import Episode
from experiments.tiny_policy.hotpotqa.demonstrations import Demonstrator, Mixture
from experiments.tiny_policy.hotpotqa.invented import Inventor
from experiments.tiny_policy.transcripts import Played, Transcript, play
from rlds_jax.rollouts.prompts import EpisodeText
from rlds_jax.rollouts.types import Trajectory
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.hotpotqa import offline
from rlds_jax.tasks.hotpotqa.environment import HotpotQAEnvironment
from rlds_jax.tasks.hotpotqa.passages import Passage
from rlds_jax.tasks.hotpotqa.retriever import Retriever
from rlds_jax.tasks.hotpotqa.task import HotpotQA

_ODD_LETTERS = "|".join(rf"\p{{Lu}}\p{{L}}{{{count}}}" for count in range(1, 20, 2))


class HotpotQARecipe:
    """See `Recipe` and `Drilled`. A digit is one token. A capitalised word is cut into pairs of
    letters: a name never seen has the tokens of others, and few of them occur twice in a text, so
    that the next token of a name follows from its last. A space between two such words belongs to
    the first."""

    directory = "tiny_hotpotqa"
    critics = critics
    alone = rf"\d|\n+|</?|(?:\p{{Lu}}\p{{L}}?|(?<={_ODD_LETTERS})\p{{L}}{{1,2}})(?: (?=\p{{Lu}}))?"
    vocabulary = 2560
    sft = types.MappingProxyType(
        {
            "epochs": 1,
            "model.hidden_size": 128,
            "model.intermediate_size": 256,
            "model.num_layers": 4,
            "model.num_heads": 4,
            "model.num_kv_heads": 4,
            "model.rope_theta": 300.0,
            "batch.rows": 4,
            "batch.row_length": 512,
            "optimizer.learning_rate": 1.5e-3,
        }
    )
    drill_sft = types.MappingProxyType(
        {
            "batch.rows": 8,
            "batch.row_length": 256,
            "optimizer.schedule": "constant",
            "optimizer.learning_rate": 3e-3,
        }
    )
    items = 5_000

    def config(self) -> ConfigDict:
        return get_config("tiny")

    def transcripts(
        self, task: HotpotQA, split: str, start: int, stop: int, seed: int
    ) -> Iterator[Transcript]:
        return Demonstrator(task, Mixture(), seed).transcripts(split, start, stop)

    def drills(self, task: HotpotQA, seed: int) -> Iterable[Transcript]:
        """Names to write down again: short enough that copying is found in some hundred steps."""
        validation = (item.data["question"] for item in task.items("validation"))
        names = Inventor(offline.load_articles(), validation)
        rng = random.Random(f"drills {seed}")
        return (names.drill(rng) for _ in range(34_000))

    def probes(self, task: HotpotQA) -> Sequence[EpisodeText]:
        search = '<tool_call>{"name": "search", "arguments": {"query": "Ada"}}</tool_call>'
        broken = '<tool_call>{"name": "search"</tool_call>'
        wrong = [search, broken, "hm", r"\boxed{no}"]
        return [_probe(task, turns) for turns in (wrong, [r"\boxed{1815}"], ["hm"] * 5)]

    def replay(self, task: HotpotQA, item: Item, trajectory: Trajectory) -> Episode:
        assert trajectory.ended_by is not None
        return Episode.of(
            Played(
                trajectory.initial_observation,
                trajectory.turns,
                trajectory.reward,
                trajectory.success,
                trajectory.ended_by,
            )
        )


RECIPE = HotpotQARecipe()


class _OnePassage:
    async def search(self, query: str, top_k: int) -> tuple[Passage, ...]:
        text = "British mathematician (1815–1852). She wrote notes on an engine of Babbage. " * 2
        return (Passage("0", "Ada", text),) * top_k

    async def close(self) -> None:
        pass


def _probe(task: HotpotQA, actions: Sequence[str]) -> Played:
    remaining = iter(actions)
    retriever = Retriever(_OnePassage())
    environment = HotpotQAEnvironment("Born when?", ["1815"], retriever, task.limits)
    played = play(environment, lambda *_: next(remaining))
    retriever.close()
    return played
