"""Scores of a boxed answer: the official HotpotQA and SQuAD measures (METHOD section 6)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from rlds_jax.tasks.think import outside_think

LEAST_F1 = 0.3  # a smaller overlap earns nothing
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\[{}\\]|[{}]")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_EXACT_ONLY = ("yes", "no", "noanswer")


def extract_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{}` or `\fbox{}` outside think blocks, or None.

    Braces inside it must balance (`\{` and `\}` are text); a box left open is none. Of boxes in one
    another the innermost counts.
    """
    text = outside_think(text)
    for box in reversed(list(_BOX.finditer(text))):
        depth = 1
        for brace in _BRACE.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if not depth:
                return text[box.end() : brace.start()].strip()
    return None


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces: SQuAD's normalisation."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", plain).split())


def exact_match(prediction: str, gold: str) -> bool:
    return normalise(prediction) == normalise(gold)


def f1(prediction: str, gold: str) -> float:
    """F1 of the two multisets of normalised tokens, in [0, 1]; two empty ones give 1."""
    predicted, wanted = (Counter(normalise(text).split()) for text in (prediction, gold))
    total = predicted.total() + wanted.total()
    return 2 * (predicted & wanted).total() / total if total else 1.0


def reward(answer: str | None, golds: str | Sequence[str], strict_yes_no: bool = True) -> float:
    """The best score over the accepted answers.

    1 for an exact match, else the F1 where that is at least 0.3, else 0. No answer gives 0.

    Args:
      golds: the accepted answer, or several.
      strict_yes_no: where one side is yes, no or noanswer, only an exact match counts.

    Raises:
      ValueError: there are no golds.
    """
    accepted = [golds] if isinstance(golds, str) else list(golds)
    if not accepted:
        raise ValueError("reward needs at least one accepted answer")
    if answer is None:
        return 0.0
    return max(_score(answer, gold, strict_yes_no) for gold in accepted)


def _score(answer: str, gold: str, strict_yes_no: bool) -> float:
    sides = normalise(answer), normalise(gold)
    if sides[0] == sides[1]:
        return 1.0
    if strict_yes_no and any(side in _EXACT_ONLY for side in sides):
        return 0.0
    overlap = f1(answer, gold)
    return overlap if overlap >= LEAST_F1 else 0.0
