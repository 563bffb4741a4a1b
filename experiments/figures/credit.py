"""The tokens of a group's rollouts coloured by advantage, under GRPO and under SDAE."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from experiments.figures import credit_layout, style
from experiments.figures.credit_layout import Rollout, Turn
from rlds_jax import run_files
from rlds_jax.models import hub
from rlds_jax.rollouts.markdown import pivot_turns

Record = Mapping[str, Any]
Decode = Callable[[Sequence[int]], str]
MOST_ROLLOUTS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, required=True, help="training step, from 1")
    parser.add_argument(
        "--group",
        help="uid of the group; by default one with graded rollouts of both signs and a retry",
    )


def write(arguments: argparse.Namespace) -> Path:
    """Draws the figure and returns its path.

    Raises:
      FileNotFoundError: the workdir holds no run.
      ValueError: the step has no such group.
    """
    workdir = arguments.workdir
    config = run_files.config(workdir)
    group = choose_group(run_files.rollouts(workdir, arguments.step), arguments.group)
    decode = decoder(config["model"]["path"])
    decomposed = config["rollout"]["condition"] == "rlds"
    rollouts = [prepare(record, decode, decomposed) for record in choose_rollouts(group)]
    uid = group[0]["group"]
    figure = credit_layout.draw(f"group {uid}, item {group[0]['item']}", rollouts)
    return style.save(figure, arguments.out, workdir, f"credit-{uid}")


def choose_group(records: Sequence[Record], uid: str | None = None) -> list[Record]:
    """The records of group `uid`, or of the first of the most telling ones.

    Graded rollouts of both signs tell the most, then a retry that did better than its original,
    then any retry.

    Raises:
      ValueError: there is no group `uid`.
    """
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record["group"]].append(record)
    if uid is None:
        return max(groups.values(), key=_interest)
    if uid not in groups:
        raise ValueError(f"--group is {uid}; this step has {', '.join(groups)}")
    return groups[uid]


def choose_rollouts(group: Sequence[Record]) -> list[Record]:
    """Up to four rollouts: the best retry after its original, and the most unlike originals."""
    by_uid = {record["uid"]: record for record in group}
    retries = [record for record in group if record["parent"] in by_uid]
    pair: list[Record] = []
    if retries:
        retry = max(retries, key=lambda record: record["reward"])
        pair = [by_uid[retry["parent"]], retry]
    shown = {record["uid"] for record in pair}
    others = [r for r in group if r["parent"] is None and r["uid"] not in shown]
    others.sort(key=lambda record: record["advantage"], reverse=True)
    room = MOST_ROLLOUTS - len(pair)
    best = others[: (room + 1) // 2]
    worst = others[len(best) :][-(room // 2) :]
    return [*best, *worst, *pair]


def prepare(record: Record, decode: Decode, decomposed: bool) -> Rollout:
    """The facts of one rollout.

    Args:
      record: of rollouts.jsonl.
      decode: ids to text.
      decomposed: the run computed SDAE advantages.
    """
    pivots = pivot_turns(record) if decomposed else {}
    turns = [
        Turn(
            tokens=token_texts(ids, decode),
            grpo=record["grpo_advantage"],
            sdae=advantage if decomposed else None,
            masked=number < record["masked_turns"],
            pivots=[name for name, turn in pivots.items() if turn == number],
        )
        for number, (ids, advantage) in enumerate(
            zip(record["turn_tokens"], record["turn_advantages"], strict=True)
        )
    ]
    title = f"{record['uid']}   reward {record['reward']:g} ({record['ended_by']})"
    if record["parent"] is not None:
        title += f"   retry of {record['parent']} from turn {record['retry_from']}"
    grades = [(k, grade, record["pivots"][k]) for k, grade in (record["grades"] or {}).items()]
    return Rollout(title, turns, grades, record["guidance"])


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text of each token; tokens that only together make a character are joined."""
    texts = []
    pending: list[int] = []
    for id in ids:
        pending.append(id)
        text = decode(pending)
        if not text.endswith("\ufffd"):
            texts.append(text)
            pending = []
    return [*texts, decode(pending)] if pending else texts


def decoder(model: str) -> Decode:
    """Decodes with the tokenizer of a run's `model.path`.

    Raises:
      FileNotFoundError: it has none.
    """
    path = hub.local_directory(model) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; bring it back to decode the tokens")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def _interest(group: Sequence[Record]) -> tuple[bool, bool, bool]:
    reward = {record["uid"]: record["reward"] for record in group}
    signs = {r["advantage"] > 0 for r in group if r["grades"] and r["advantage"]}
    retries = [record for record in group if record["parent"] in reward]
    improved = any(record["reward"] > reward[record["parent"]] for record in retries)
    return len(signs) == 2, improved, bool(retries)
