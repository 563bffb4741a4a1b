"""Whole rollouts of a group as markdown, made from their records in rollouts.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def sample(groups: Sequence[Sequence[Record]]) -> Sequence[Record]:
    """The group to show of a step: the first with a retry, else the first with a rollout."""
    retried = (group for group in groups if any(record["parent"] for record in group))
    return next(retried, None) or next(group for group in groups if group)


def group(records: Sequence[Record]) -> str:
    """Originals and retries of a group: turns, grades, pivots, reflection and guidance.

    Text that a model or an environment wrote is in indented blocks, so none of it is markup.
    """
    first = records[0]
    title = f"# group {first['group']}, item {first['item']}"
    parts = [title, _block(first["initial_observation"])]
    return "\n\n".join(parts + [rollout(record) for record in records])


def rollout(record: Record) -> str:
    """One rollout."""
    parts = [_title(record), _summary(record)]
    if record["guidance"]:
        parts += ["guidance:", _block(record["guidance"])]
    turns = zip(record["turns"], record["turn_advantages"], strict=True)
    for number, (turn, advantage) in enumerate(turns):
        parts += [_turn_title(record, number, advantage), _block(turn["action"])]
        parts += ["observation:", _block(turn["observation"])]
    if record["grades"]:
        parts.append(_grades(record))
    for role in ("grader", "reflector"):
        if role in record:
            error = record[role]["error"]
            title = f"{role}, not valid ({error}):" if error else f"{role}:"
            parts += [title, _block(record[role]["text"])]
    return "\n\n".join(parts)


def pivot_turns(record: Record) -> dict[str, int]:
    """Where a rollout's kernels are centred, by subtask; without the null pivots (METHOD 2)."""
    tokens = enumerate(record["turn_advantages"])
    last = max((turn for turn, advantage in tokens if advantage is not None), default=0)
    pivots = (record["pivots"] or {}).items()
    return {name: min(pivot, last) for name, pivot in pivots if pivot is not None and pivot >= 0}


def _title(record: Record) -> str:
    if record["parent"] is None:
        return f"## rollout {record['uid']}"
    return f"## retry of {record['parent']} from turn {record['retry_from']}"


def _summary(record: Record) -> str:
    return (
        f"reward {record['reward']:g}, ended by {record['ended_by']}, "
        f"advantage {record['advantage']:+.3f} (GRPO {record['grpo_advantage']:+.3f})"
    )


def _turn_title(record: Record, number: int, advantage: float | None) -> str:
    notes = [] if advantage is None else [f"advantage {advantage:+.3f}"]
    if number < record["masked_turns"]:
        notes.append("not in the loss")
    pivots = [name for name, pivot in pivot_turns(record).items() if pivot == number]
    if pivots:
        notes.append(f"pivot of {', '.join(pivots)}")
    return f"**turn {number}**" + (f": {'; '.join(notes)}" if notes else "")


def _grades(record: Record) -> str:
    rows = [
        f"| {name} | {_or_dash(grade)} | {_or_dash(record['pivots'][name])} |"
        for name, grade in record["grades"].items()
    ]
    return "\n".join(["| subtask | grade | pivot turn |", "| --- | ---: | ---: |", *rows])


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))
