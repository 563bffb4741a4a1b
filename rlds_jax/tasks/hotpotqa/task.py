"""HotpotQA: its texts, options and items (METHOD sections 5 and 6)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlds_jax.tasks.base import Item, Subtask
from rlds_jax.tasks.hotpotqa.client import Form, HttpSource
from rlds_jax.tasks.hotpotqa.data import load_items
from rlds_jax.tasks.hotpotqa.environment import SEARCH, HotpotQAEnvironment, Limits
from rlds_jax.tasks.hotpotqa.retriever import Retriever

SUBTASKS = (
    Subtask(
        "search_planning",
        0.25,
        "Splits the question and opens with a focused query, not the question word for word; "
        "weighs most in the first turn that searches.",
    ),
    Subtask(
        "evidence_extraction",
        0.30,
        "Finds the passage that holds the bridge entity or the answer, and does not trust the "
        "first hit blindly.",
    ),
    Subtask(
        "search_iteration",
        0.30,
        "Carries the bridge entity into the next query, broadens or narrows after a miss, and "
        "knows when to stop.",
    ),
    Subtask(
        "answer_grounding",
        0.15,
        "The boxed answer rests on retrieved text and not on prior knowledge.",
    ),
)

_PROMPT = r"""You answer questions with evidence from an encyclopedia.
- Look things up with the search tool before you answer; one call per turn:
<tool_call>{{"name": "search", "arguments": {{"query": "what to look for"}}}}</tool_call>
- Arguments are valid JSON with double-quoted keys, and hold nothing but the values: no schemas, no commentary.
- Keep top_k small unless you need coverage.
- Rest your answer on what the searches return. Give it, and nothing else, in \boxed{{}}: a name, a date, a short phrase, or yes or no.
You have {turns} turns; a turn with a tool call is not an answer."""  # noqa: E501
_ADVICE = "\n\n## Advice\n"


@dataclasses.dataclass(frozen=True)
class HotpotQA:
    r"""The task, and its options.

    Attributes:
      data_path: hub id or local directory of the questions.
      retriever: URL of a retrieval server, or an index directory to search in this process.
      retriever_form: what the server speaks: "queries" (Search-R1) or "query".
      timeout: seconds for one try of a search.
      max_failures: so many failed searches in a row, and the run is stopped.
      cache_size: search results kept.
      max_turns, max_parallel_calls, result_chars, call_chars: see `Limits`.
      strict_yes_no: yes, no and noanswer must match exactly.
      train_items, validation_items: most items per split.
      seed: of the choice of training items.

    Raises:
      ValueError: a field that cannot hold, by name.
    """

    data_path: str = "hotpotqa/hotpot_qa"
    retriever: str = "http://127.0.0.1:8000"
    retriever_form: Form = "queries"
    timeout: float = 30.0
    max_failures: int = 100
    cache_size: int = 16384
    max_turns: int = 5
    max_parallel_calls: int = 1
    result_chars: int = 1200
    call_chars: int = 8000
    strict_yes_no: bool = True
    train_items: int = 20_000
    validation_items: int = 500
    seed: int = 0

    name: ClassVar[str] = "hotpotqa"
    subtasks: ClassVar[tuple[Subtask, ...]] = SUBTASKS
    observation_role: ClassVar[Literal["user", "tool"]] = "tool"
    replay: ClassVar[Literal["execute", "restore"]] = "restore"
    tools: ClassVar[tuple[dict[str, Any], ...]] = (SEARCH,)

    def __post_init__(self):
        for field in (
            "max_failures",
            "cache_size",
            "max_turns",
            "max_parallel_calls",
            "result_chars",
            "call_chars",
            "train_items",
            "validation_items",
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if not self.timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {self.timeout}")
        if self.retriever_form not in ("queries", "query"):
            raise ValueError(
                f'retriever_form must be "queries" or "query", got {self.retriever_form!r}'
            )

    def system_prompt(self, guidance: str | None = None) -> str:
        return _PROMPT.format(turns=self.max_turns) + (_ADVICE + guidance if guidance else "")

    def items(self, split: Literal["train", "validation"]) -> Sequence[Item]:
        """Raises ValueError where the questions cannot be loaded (see `load_items`)."""
        limits = {"train": self.train_items, "validation": self.validation_items}
        return load_items(self.data_path, split, limits[split], self.seed)

    def environment(self, item: Item) -> HotpotQAEnvironment:
        """Raises ValueError where the retriever cannot be opened."""
        return HotpotQAEnvironment(
            item.data["question"],
            item.data["answers"],
            self.searches,
            self.limits,
            self.strict_yes_no,
        )

    @property
    def limits(self) -> Limits:
        return Limits(self.max_turns, self.max_parallel_calls, self.result_chars, self.call_chars)

    def close(self) -> None:
        if "searches" in vars(self):
            self.searches.close()

    @functools.cached_property
    def searches(self) -> Retriever:
        """The retriever all episodes share, opened when the first one starts."""
        if self.retriever.startswith(("http://", "https://")):
            source: Any = HttpSource(self.retriever, self.retriever_form, self.timeout)
        else:
            from rlds_jax.tasks.hotpotqa.searcher import open_in_process  # faiss, only for this

            source = open_in_process(Path(self.retriever))
        return Retriever(source, self.cache_size, self.max_failures)
