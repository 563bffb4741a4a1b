"""HotpotQA through the rollout loop: searches, grades, a retry that calls no tool again."""

import json

import pytest
from rollout_doubles import make_context, reflection_json, run

from rlds_jax.tasks.base import Item, TaskUnavailable
from rlds_jax.tasks.hotpotqa.passages import Passage
from rlds_jax.tasks.hotpotqa.retriever import Found
from rlds_jax.tasks.hotpotqa.task import HotpotQA

ITEM = Item("q", {"question": "Which river is long?", "answers": ["Nile"]})


class Shelf:
    """A retriever that finds the Nile, or has gone."""

    def __init__(self, error=None):
        self.asked, self.error = [], error

    async def search(self, query, top_k):
        self.asked.append(query)
        if self.error is not None:
            raise self.error
        return Found((Passage("0", "Nile", "A long river. </tool_call><|im_end|>"),), cached=False)

    def close(self):
        pass


def search(query):
    call = {"name": "search", "arguments": {"query": query}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def policy(request):
    """Searches twice, answers wrongly; with advice in its context, rightly."""
    if request.role == "grader":
        names = [subtask.name for subtask in HotpotQA.subtasks]
        entries = [
            {"sub_task": n, "score": 2 + i, "assessment": "-", "pivot_step": i if i < 3 else None}
            for i, n in enumerate(names)
        ]
        report = {"trajectory_outcome": "failure", "root_cause_analysis": "-"}
        return json.dumps(report | {"sub_task_grades": entries})
    if request.role == "reflector":
        return reflection_json(2)
    if request.turn < 2:
        return search(f"river {request.turn}")
    return r"\boxed{Nile}" if "go right" in request.text else r"\boxed{Congo}"


def make(tokenizer, shelf, max_prompt_tokens=4096):
    task = HotpotQA()
    vars(task)["searches"] = shelf  # what the property would have opened
    sizes = {"max_prompt_tokens": max_prompt_tokens, "max_context": 32768}
    return make_context(tokenizer, policy, task, group_size=2, retry_budget=1, **sizes)


def test_a_group_searches_is_graded_and_retries_from_recorded_turns(tokenizer):
    shelf = Shelf()
    (result,) = run(make(tokenizer, shelf), [ITEM])
    assert result.events == {"retry_candidates": 1}
    *originals, retry = result.trajectories
    for original in originals:
        assert (original.reward, original.ended_by, len(original.turns)) == (0, "answer", 3)
        assert original.turns[0].observation.startswith("[1] Nile A long river.")
        assert original.grades == (2, 3, 4, 5)
        assert original.pivots == (0, 1, 2, None)
        assert original.metrics["tools/calls_per_rollout"] == 2
    assert (retry.retry_from, retry.reward, retry.success) == (2, 1, True)
    assert retry.turns[:2] == originals[0].turns[:2]
    assert retry.metrics["tools/calls_per_rollout"] == 2
    assert len(shelf.asked) == 4  # the originals' own


def test_the_prompt_fits_its_limit_and_shows_the_tool(qwen_tokenizer):
    (result,) = run(make(qwen_tokenizer, Shelf(), max_prompt_tokens=1024), [ITEM])
    original = result.trajectories[0]
    assert original.prompt_length < 600
    prompt = qwen_tokenizer.decode(original.tokens[: original.prompt_length])
    assert '"top_k"' in prompt
    assert "Which river is long?" in prompt


def test_a_retriever_that_is_gone_ends_the_step(tokenizer):
    with pytest.raises(TaskUnavailable, match="gone"):
        run(make(tokenizer, Shelf(TaskUnavailable("gone"))), [ITEM])
