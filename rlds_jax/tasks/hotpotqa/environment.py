"""One HotpotQA episode: searches by tool calls, a boxed answer at the end (METHOD section 6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlds_jax.tasks.base import StepResult
from rlds_jax.tasks.hotpotqa import reward
from rlds_jax.tasks.hotpotqa.passages import Passage
from rlds_jax.tasks.hotpotqa.retriever import RetrievalError, Retriever
from rlds_jax.tasks.tool_calls import MalformedCall, ToolCall, check_arguments, parse_tool_calls

MAX_TOP_K = 50
SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds passages of an encyclopedia that fit a query.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for."},
                "top_k": {
                    "type": "integer",
                    "description": "How many passages to return.",
                    "minimum": 1,
                    "maximum": MAX_TOP_K,
                    "default": 5,
                },
            },
            "required": ["query"],
        },
    },
}

_REMINDER = (
    "There was neither a tool call nor an answer. Search with <tool_call>, or give the final "
    r"answer in \boxed{}."
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of an episode, in turns, calls and characters.

    Attributes:
      max_turns: turns in an episode.
      max_parallel_calls: most calls executed in one turn; more are refused with a notice.
      result_chars: longest single result.
      call_chars: longest answer to one call.
    """

    max_turns: int = 5
    max_parallel_calls: int = 1
    result_chars: int = 1200
    call_chars: int = 8000


@dataclasses.dataclass
class Counts:
    """What the calls of an episode came to.

    Attributes:
      valid, malformed: calls written.
      searches: calls executed, failed ones included.
      cached: searches whose result was known or already asked for.
      failed: searches that the retriever did not answer.
    """

    valid: int = 0
    malformed: int = 0
    searches: int = 0
    cached: int = 0
    failed: int = 0

    def metrics(self) -> dict[str, float]:
        """Scalars by name; a rate of nothing is absent."""
        named = {
            "tools/calls_per_rollout": float(self.searches),
            "tools/malformed_per_rollout": float(self.malformed),
            "tools/failed_per_rollout": float(self.failed),
        }
        if self.valid + self.malformed:
            named["tools/valid_call_rate"] = self.valid / (self.valid + self.malformed)
        if self.searches:
            named["tools/cache_hit_rate"] = self.cached / self.searches
        return named


def show(passages: Sequence[Passage], limits: Limits) -> str:
    """The passages as the policy reads them, cut to the limits with a notice at each cut."""
    if not passages:
        return "No results."
    lines = []
    for number, passage in enumerate(passages, 1):
        text = " ".join(passage.text.split())
        line = f"[{number}] {passage.title} {text}"
        if len(line) > limits.result_chars:
            notice = f" [cut at {limits.result_chars} characters]"
            line = line[: limits.result_chars].rstrip() + notice
        lines.append(line)
    shown = "\n".join(lines)
    if len(shown) <= limits.call_chars:
        return shown
    notice = f"\n[results cut at {limits.call_chars} characters: ask for fewer]"
    return shown[: limits.call_chars].rstrip() + notice


class HotpotQAEnvironment:
    """One episode on one question.

    Attributes:
      counts: of the calls so far.
    """

    def __init__(
        self,
        question: str,
        answers: Sequence[str],
        retriever: Retriever,
        limits: Limits,
        strict_yes_no: bool = True,
    ):
        self._question = question
        self._answers = list(answers)
        self._retriever = retriever
        self._limits = limits
        self._strict_yes_no = strict_yes_no
        self._turns = 0
        self._done = True
        self.counts = Counts()

    async def reset(self) -> str:
        self._turns = 0
        self._done = False
        self.counts = Counts()
        return f"Question: {self._question}"

    async def step(self, text: str) -> StepResult:
        """Executes the calls of one turn, or scores its answer.

        Raises:
          RuntimeError: the episode has ended or was never reset.
          TaskUnavailable: the retriever failed too often.
        """
        if self._done:
            raise RuntimeError("HotpotQA: step on an ended episode; call reset first")
        self._turns += 1
        last = self._turns >= self._limits.max_turns
        calls = self._read(text)
        answer = None if calls else reward.extract_boxed(text)
        if answer is not None:
            return self._end("answer", answer)
        if last:
            return self._end("max_turns", None)
        return StepResult(await self._execute(calls) if calls else _REMINDER)

    async def conclude(self, ended_by: str) -> StepResult:
        return self._end(ended_by, None)

    async def restore(self, turns: Sequence[tuple[str, str]]) -> None:
        """Takes over turns; their calls count as written, and those it would run as executed."""
        for action, _ in turns:
            self._turns += 1
            calls = self._read(action)[: self._limits.max_parallel_calls]
            self.counts.searches += sum(not isinstance(call, MalformedCall) for call in calls)

    async def close(self) -> None:
        self._done = True

    def _read(self, text: str) -> list[dict[str, Any] | MalformedCall]:
        """The turn's calls as checked arguments, counted."""
        checked = [
            check_arguments(call, [SEARCH]) if isinstance(call, ToolCall) else call
            for call in parse_tool_calls(text)
        ]
        checked = [_refuse_blank(arguments) for arguments in checked]
        malformed = sum(isinstance(call, MalformedCall) for call in checked)
        self.counts.malformed += malformed
        self.counts.valid += len(checked) - malformed
        return checked

    async def _execute(self, calls: Sequence[dict[str, Any] | MalformedCall]) -> str:
        """The observation that answers a turn's calls."""
        limit = self._limits.max_parallel_calls
        answers = [await self._answer(call) for call in calls[:limit]]
        if len(answers) > 1:
            answers = [f"Call {i}:\n{answer}" for i, answer in enumerate(answers, 1)]
        if len(calls) > limit:
            answers.append(f"[only the first {limit} of {len(calls)} calls were looked at]")
        return "\n".join(answers)

    async def _answer(self, call: dict[str, Any] | MalformedCall) -> str:
        if isinstance(call, MalformedCall):
            return (
                f"The tool call was not executed: {call.error}. Write <tool_call>"
                '{"name": "search", "arguments": {"query": "..."}}</tool_call>.'
            )
        self.counts.searches += 1
        try:
            found = await self._retriever.search(call["query"], call["top_k"])
        except RetrievalError:
            self.counts.failed += 1
            return "The search service did not answer. Try again, or go on without it."
        self.counts.cached += found.cached
        return show(found.passages, self._limits)

    def _end(self, ended_by: str, answer: str | None) -> StepResult:
        self._done = True
        score = reward.reward(answer, self._answers, self._strict_yes_no)
        exact = answer is not None and any(
            reward.exact_match(answer, gold) for gold in self._answers
        )
        if exact:
            verdict = "The answer is correct."
        elif score:
            verdict = f"The answer is partially correct (F1 score: {score:.2f})."
        elif answer is None:
            verdict = f"No answer was given ({ended_by}): incorrect."
        else:
            verdict = "The answer is incorrect."
        return StepResult(
            observation=verdict,
            done=True,
            reward=score,
            success=exact,
            ended_by=ended_by,
            metrics={
                "exact_match": float(exact),
                "answered": float(answer is not None),
                **self.counts.metrics(),
            },
        )


def _refuse_blank(call: dict[str, Any] | MalformedCall) -> dict[str, Any] | MalformedCall:
    """A query must hold something that can be encoded; lone surrogates become U+FFFD."""
    if isinstance(call, MalformedCall):
        return call
    query = call["query"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    query = " ".join(query.replace("\0", " ").split())
    if not query:
        return MalformedCall('the argument "query" is empty', "search")
    return {**call, "query": query}
