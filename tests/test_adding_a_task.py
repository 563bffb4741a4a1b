"""The task and the config of docs/adding_a_task.md, run as they stand there."""

import asyncio
import json
import re
import sys
import types
from pathlib import Path

import pytest
from rollouts.rollout_doubles import build_tokenizer, make_context, reflection_json

from rlds_jax.play import make_task
from rlds_jax.rollouts.group import run_groups
from rlds_jax.trainer import step_items

DOCS = Path(__file__).parent.parent / "docs" / "adding_a_task.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def config(monkeypatch):
    """The config of the docs, with the task's module where the docs put it."""
    made = []
    for name, code in zip(("rlds_jax.tasks.guess", "configs.guess"), BLOCKS, strict=True):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(code, f"{DOCS}: {name}", "exec"), module.__dict__)
        made.append(module)
    return made[1].get_config()


def grades(bisection, pivot):
    entries = [
        {"sub_task": "bisection", "score": bisection, "assessment": "-", "pivot_step": pivot},
        {"sub_task": "bookkeeping", "score": 5, "assessment": "-", "pivot_step": None},
    ]
    report = {"trajectory_outcome": "failure", "root_cause_analysis": "it guessed high"}
    return json.dumps(report | {"sub_task_grades": entries})


def policy(request):
    """Guesses 50, then 90 for ever; with advice in its context, 25."""
    if request.role == "grader":
        return grades(2, 1)
    if request.role == "reflector":
        return reflection_json(1)
    if request.turn == 0:
        return "<guess>50</guess>"
    return f"<guess>{25 if 'go right' in request.text else 90}</guess>"


def test_the_task_plays_a_group(config):
    task = make_task(config.task)
    (item,) = [item for item in task.items("train") if item.data["number"] == 25]
    context = make_context(build_tokenizer(), policy, task, group_size=2, retry_budget=1)
    (result,) = asyncio.run(run_groups(context, [item], step=1))
    assert not result.events.keys() - {"retry_candidates"}
    *originals, retry = result.trajectories
    assert len(originals) == 2
    for original in originals:
        answers = [turn.observation for turn in original.turns]
        assert answers[0] == "The number is lower. 6 guesses left."
        assert answers[-1] == "The number was 25."
        assert (original.reward, original.ended_by, len(answers)) == (0, "max_turns", 7)
        assert (original.grades, original.pivots) == ((2, 5), (1, None))
    assert retry.retry_from == 1
    assert (retry.reward, retry.ended_by, len(retry.turns)) == (1, "found", 2)


def test_a_turn_without_a_guess_is_told_so(config):
    task = make_task(config.task)
    environment = task.environment(task.items("train")[0])
    answer = asyncio.run(environment.step("<think><guess>1</guess></think> hmm"))
    assert not answer.done
    assert "No guess found" in answer.observation


def test_the_splits_share_no_item_and_fill_a_step(config):
    task = make_task(config.task)
    train, validation = ({i.data["number"] for i in task.items(s)} for s in ("train", "validation"))
    assert not train & validation
    assert len(step_items(task.items("train"), 1, config.prompts_per_step, 0)) == 16
    assert sum(subtask.weight for subtask in task.subtasks) == pytest.approx(1)
