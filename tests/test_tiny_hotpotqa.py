"""The demonstrations of the tiny HotpotQA policy, and two steps of its run."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer

from configs.hotpotqa import get_config
from experiments.tiny_policy.hotpotqa import critics
from experiments.tiny_policy.hotpotqa.actor import GUIDED, act, plan, query_of
from experiments.tiny_policy.hotpotqa.critics import Episode
from experiments.tiny_policy.hotpotqa.demonstrations import Demonstrator, Mixture
from experiments.tiny_policy.hotpotqa.invented import Inventor, Shelf
from experiments.tiny_policy.recipe import bundled, load
from experiments.tiny_policy.transcripts import Played
from rlds_jax import run_files
from rlds_jax.rollouts.grading import parse_grades
from rlds_jax.rollouts.reflection import parse_reflection
from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.hotpotqa import offline
from rlds_jax.tasks.hotpotqa.questions import Article
from rlds_jax.tasks.hotpotqa.task import SUBTASKS

ROOT = Path(__file__).parent.parent
NAMES = [subtask.name for subtask in SUBTASKS]
COMPARISON = "Who was born first, Ada or Bob?"
ADA, BOB = "Ada Poet (1815–1852). She", "Bob Actor (born 1950). He"


def test_a_comparison_searches_for_both_and_answers():
    assert plan(COMPARISON, []).target == "Ada"
    assert plan(COMPARISON, [ADA]).target == "Bob"
    known = plan(COMPARISON, [ADA, BOB])
    assert (known.target, known.note, known.answer) == (None, "1815 < 1950", "Ada")


def test_a_bridge_goes_by_the_creator():
    question = "In which year did the creator of Ode (1843 poem) die?"
    assert plan(question, []).target == "Ode"
    results = ["Ode 1843 poem by Ada. It is"]
    assert plan(question, results).target == "Ada"
    assert plan(question, [*results, ADA]).answer == "1852"


def test_a_region_goes_by_the_country():
    question = "In which part of the world is the country whose capital is Lima?"
    results = ["Lima Capital and largest city of Peru. Lima is"]
    assert plan(question, results).target == "Peru"
    assert (
        plan(question, [*results, "Peru Country in South America. Peru"]).answer == "South America"
    )


def test_names_are_cut_into_pairs_of_letters_that_keep_the_space_between_words():
    tokenizer = AutoTokenizer.from_pretrained(bundled(load("hotpotqa")))

    def pieces(text):
        return [tokenizer.decode([i]) for i in tokenizer.encode(text, add_special_tokens=False)]

    assert pieces("Ada Lovelace") == ["Ad", "a ", "Lo", "ve", "la", "ce"]
    asked = pieces('{"name": "search", "arguments": {"query": "Ada Lovelace", "top_k": 1}}')
    start = asked.index("Ad")
    assert asked[start : start + 6] == pieces("Ada Lovelace")
    assert pieces("(1815–1852)") == ["(", *"1815", "–", *"1852", ")"]


def _search(query):
    return act(f"Who was born first, {query} or X?", [], GUIDED, random.Random(0))


def _episode(turns, success=False):
    played = (Turn(action, observation) for action, observation in turns)
    return Episode.of(Played(f"Question: {COMPARISON}", tuple(played), 0.0, success, "answer"))


def test_kinds_of_turns_and_where_a_retry_starts():
    assert query_of(_search("Ada")) == "Ada"
    early = _episode([(_search("Ada"), f"[1] {ADA}"), (r"\boxed{Bob}", "")])
    assert early.kinds == ("good", "early")
    assert critics.retry_step(early) == 1
    assert "search for Bob" in critics.suggestion(early)
    planning, evidence, iteration, grounding = critics.grade(early)
    assert (planning.score, evidence.score) == (5, 5)
    assert (iteration.pivot, grounding.score, grounding.pivot) == (1, 1, 1)
    lost = _episode([(_search("Ada"), ""), (_search("Ada"), ""), ("<tool_call>{", "")])
    assert lost.kinds == ("good", "repeat", "broken")
    right = [(_search("Ada"), f"[1] {ADA}"), (_search("Bob"), f"[1] {BOB}"), (r"\boxed{Ada}", "")]
    grades = critics.grade(_episode(right, success=True))
    assert [(grade.score, grade.pivot) for grade in grades] == [(5, 0), (5, 1), (5, 1), (5, 2)]


PEOPLE = ["Ada", "Bea", "Cleo", "Dora", "Edna", "Fay", "Gwen", "Hope", "Ines", "Jane"]
SMALL = {
    **{
        f"Ode {i}": Article(f"Ode {i}", f"178{i} poem by {PEOPLE[i]}", "", "Arts") for i in range(4)
    },
    "Lima": Article("Lima", "Capital of Nowhere", "", "Geography"),
    "Chad": Article("Chad", "Country in Africa", "", "Geography"),
} | {
    name: Article(name, f"Poet ({1800 + i}–{1900 + i})", "", "People")
    for i, name in enumerate(PEOPLE)
}


@pytest.fixture(scope="module")
def task_options(tmp_path_factory):
    """Options of the tiny task on a dozen people, made once."""
    directory = tmp_path_factory.mktemp("offline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", directory / "cache")
        patch.setattr(offline, "load_articles", lambda: SMALL)
        patch.setattr(offline, "_pool", lambda articles, *_: articles)
        offline.prepare(directory / "12-0", 12, 0)
        yield {"directory": str(directory), "passages": 12}


def test_scripted_answers_are_valid_and_say_the_truth(task_options):
    task = offline.offline(**{**get_config("tiny").task.options, **task_options})
    demonstrator = Demonstrator(task, Mixture(), seed=0)
    transcripts = list(demonstrator.transcripts("train", 0, 40))
    again = list(demonstrator.transcripts("train", 0, 3))
    assert transcripts[: len(again)] == again
    answers = {"You grade": 0, "You review": 0}
    for transcript in transcripts:
        messages = transcript["messages"]
        role = next((r for r in answers if messages[0]["content"].startswith(r)), None)
        if role is None:
            bare = messages[0]["role"] == "user"
            assert transcript.get("tools") == (None if bare else list(task.tools))
            continue
        answers[role] += 1
        turns = messages[1]["content"].count(" action:")
        if role == "You grade":
            grades = parse_grades(messages[-1]["content"], NAMES, turns)
            assert None not in grades.scores
        else:
            assert parse_reflection(messages[-1]["content"], turns).retry_from < turns
    assert all(answers.values())
    task.close()


def test_an_invented_question_is_answered_by_its_shelf():
    inventor = Inventor(SMALL, ["Who was born first, Ada or Bea?"])
    rng = random.Random(0)
    for _ in range(30):
        item, passages = inventor.scene(rng)
        question = item.data["question"]
        assert not {"Ada", "Bea"} & {p.title for p in passages}
        results = []
        while (target := plan(question, results).target) is not None:
            found = asyncio.run(Shelf(passages).search(target, 2))
            assert target in [passage.title for passage in found]
            results += [f"{passage.title} {passage.text}" for passage in found]
        assert plan(question, results).answer == item.data["answers"][0]


def test_two_steps_of_the_tiny_run_from_the_command_line(task_options, tmp_path):
    command = [sys.executable, "-m", "rlds_jax.train", "--config=configs/hotpotqa.py:tiny"]
    flags = {"steps": 2, "prompts_per_step": 2, "validation.num_items": 2}
    flags |= {f"task.options.{name}": value for name, value in task_options.items()}
    command += [f"--config.{name}={value}" for name, value in flags.items()]
    subprocess.run([*command, f"--workdir={tmp_path}"], cwd=ROOT, check=True)
    scalars = run_files.scalars(tmp_path)
    for name in ("tools/valid_call_rate", "grader/parse_rate", "critic/rewards/mean"):
        assert len(scalars[name]) == 2, name
    assert [v["step"] for v in run_files.validations(tmp_path)] == [0, 2]
