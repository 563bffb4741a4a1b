"""Questions of the real encyclopedia; its index at a size that encodes in seconds."""

import re
from collections import Counter

import datasets
import pytest
from hotpotqa_doubles import call, play

from rlds_jax.tasks.hotpotqa import offline
from rlds_jax.tasks.hotpotqa.passages import Passage
from rlds_jax.tasks.hotpotqa.questions import Article, Hop, Question, make_questions


@pytest.fixture(scope="module")
def articles():
    return offline.load_articles()


@pytest.fixture(scope="module")
def questions(articles):
    return make_questions(articles, seed=0)


def person(name, years, work="writer"):
    return Article(name, f"French {work} ({years})", "", "People")


SMALL = {
    article.title: article
    for article in (
        Article("A Book", "1900 novel by Ada", "", "Arts"),
        Article("A Siege", "Siege by the sea (1500–1501)", "", "History"),
        *(Article(f"Town {i}", f"Capital of Land {i}", "", "Geography") for i in range(5)),
        *(Article(f"Land {i}", "Country in West Africa", "", "Geography") for i in range(5)),
        person("Ada", "1850–1910"),
        *(person(f"P{i}", f"{1800 + i}–{1900 + i}") for i in range(9)),
        person("Alive", "born 1990"),
    )
}


def test_questions_of_a_small_encyclopedia():
    made = make_questions(SMALL, seed=0, comparisons=20)
    by_kind = {kind: [q for q in made if q.kind == kind] for kind in ("bridge", "region")}
    assert {(q.question, q.answer) for q in by_kind["bridge"]} == {
        ("In which year was the creator of A Book (1900 novel) born?", "1850"),
        ("In which year did the creator of A Book (1900 novel) die?", "1910"),
    }
    region = min(by_kind["region"], key=lambda q: q.question)
    assert len(by_kind["region"]) == 5
    assert region.question.endswith("whose capital is Town 0?")
    assert region.answer == "West Africa"
    assert [hop.title for hop in region.hops] == ["Town 0", "Land 0"]
    assert sum(q.kind == "comparison" for q in made) == 20
    for q in made:
        if q.kind == "comparison":
            first, second = (SMALL[hop.title] for hop in q.hops)
            assert q.answer == min(first, second, key=lambda a: a.life[1]).title
            assert "Siege" not in q.question


def test_questions_are_seeded(articles, questions):
    assert make_questions(articles, seed=0) == questions
    assert make_questions(articles, seed=1) != questions


def test_the_splits_share_no_entity(questions):
    titles = {
        split: {hop.title for q in questions if q.split == split for hop in q.hops}
        for split in ("train", "validation")
    }
    assert titles["train"]
    assert titles["validation"]
    assert not titles["train"] & titles["validation"]


def test_every_answer_stands_in_a_passage_and_not_in_a_bridge_question(articles, questions):
    kinds = Counter(q.kind for q in questions)
    assert kinds["bridge"] > 150
    assert kinds["region"] > 60
    for q in questions:
        texts = [articles[h.title].title + offline.passage_text(articles[h.title]) for h in q.hops]
        assert any(q.answer in text for text in texts)
        if q.kind != "comparison":
            assert q.hops[1].title not in q.question or q.hops[1].title in q.hops[0].title


def test_passages_are_cut_after_a_sentence_or_a_word(articles):
    for article in articles.values():
        text = offline.passage_text(article)
        assert len(text) <= 100
        assert f"{article.description}. {article.extract}".startswith(text)
        assert re.search(r"\S$", text)


class OneShelf:
    """Finds a passage by its title alone, and never the titles it lacks."""

    def __init__(self, texts):
        self.texts = texts

    def search(self, queries, top_k):
        hits = [[t for t in self.texts if t == query] for query in queries]
        return [tuple(Passage("0", t, self.texts[t]) for t in row) for row in hits]


def test_only_questions_whose_hops_and_answers_are_found_are_kept():
    def question(answer, *titles):
        hops = tuple(Hop(t, t) for t in titles)
        return Question("bridge", "train", "?", answer, hops)

    shelf = OneShelf({"A": "made by B", "B": "born 1900"})
    asked = [question("1900", "A", "B"), question("1900", "A", "C"), question("1901", "A", "B")]
    kept, figures = offline.keep_retrievable(asked, shelf)
    assert kept == asked[:1]
    assert figures["recall@5"] == pytest.approx(2 / 3)
    assert (figures["single_hop_queries"], figures["questions_made"]) == (3, 3)


def test_the_offline_task_is_made_once_and_played(tmp_path, monkeypatch):
    """The whole path at a small size: corpus, index, questions, task, episode."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(offline, "load_articles", lambda: SMALL)
    task = offline.offline(str(tmp_path), passages=22, max_turns=3)
    made = tmp_path / "22-0"
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    assert offline.offline(str(tmp_path), passages=22, max_turns=3) == task
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before
    figures = offline.prepare(made, 22)
    assert figures["passages"] == 22
    items = task.items("train")
    kept = figures["questions_kept"]
    assert len(items) == sum(n for name, n in kept.items() if name.startswith("train/"))
    item = next(i for i in items if "Town" in i.data["question"])
    town = item.data["question"].split()[-1].rstrip("?")
    turns = [call(f"Town {town}, capital city"), r"\boxed{west Africa}"]
    first, (found, end) = play(task.environment(item), turns)
    task.close()
    assert f"whose capital is Town {town}?" in first
    assert f"Capital of Land {town}" in found.observation
    assert (end.reward, end.success) == (1, True)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(offline, "_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=r"rlds_jax\[offline\]"):
        offline.load_articles()
