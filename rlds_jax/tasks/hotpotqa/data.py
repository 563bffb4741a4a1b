"""Questions of a dataset with HotpotQA's schema, by `datasets.load_dataset`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rlds_jax.tasks.base import Item

Split = Literal["train", "validation"]
_CONFIG = "distractor"


def load_items(path: str, split: Split, limit: int, seed: int) -> list[Item]:
    """The first `limit` rows of a seeded shuffle of train, or of validation in file order.

    Args:
      path: hub id, or a local directory of the same layout.

    Returns:
      Items with "question" and "answers" (a list); fewer where the split has fewer rows.

    Raises:
      ValueError: the dataset cannot be loaded, or a row does not hold; row and field are named.
    """
    rows = _load(path, split)
    order = np.arange(len(rows))
    if split == "train":
        order = np.random.default_rng(seed).permutation(len(rows))
    chosen = order[:limit]
    return [
        _item(row, f"{path} {split} row {n}")
        for n, row in zip(chosen.tolist(), rows.select(chosen), strict=True)
    ]


def _load(path: str, split: Split) -> Any:
    import datasets  # takes a second: only where questions are read

    try:
        rows = datasets.load_dataset(path, _CONFIG, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"task.options.data_path: {path!r} has no {split} split of config {_CONFIG!r} that "
            f"can be loaded (a local directory needs the README.md of the hub's, which names the "
            f"configs): {error}"
        ) from error
    missing = {"question", "answer"} - set(rows.column_names)
    if missing:
        raise ValueError(
            f"{path} {split} has no field {sorted(missing)}; its fields are {rows.column_names}"
        )
    return rows.select_columns([c for c in ("id", "question", "answer") if c in rows.column_names])


def _item(row: dict[str, Any], where: str) -> Item:
    question, answer = row["question"], row["answer"]
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: the field question must be text, got {question!r}")
    answers = [answer] if isinstance(answer, str) else answer
    holds = isinstance(answers, Sequence) and len(answers) > 0
    if not holds or not all(isinstance(text, str) and text.strip() for text in answers):
        raise ValueError(f"{where}: the field answer must be text or texts, got {answer!r}")
    identity = row.get("id")
    if not isinstance(identity, str) or not identity:
        raise ValueError(f"{where}: the field id must be text, got {identity!r}")
    return Item(identity, {"question": question, "answers": list(answers)})
