"""Per subtask: at which turns rollouts hinged, and how a retry changed the grade."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures import style
from rlds_jax import run_files
from rlds_jax.rollouts.markdown import pivot_turns
from rlds_jax.validation import Interval, bootstrap_mean

Record = Mapping[str, Any]
DELTAS = range(-4, 5)


class Subtask(NamedTuple):
    """What the rollouts of a run say about one subtask.

    Attributes:
      name: of the subtask.
      pivots: [S] rollouts that hinged on each turn.
      null: graded rollouts without a pivot of this subtask.
      deltas: retry's grade less that of its original, for pairs that both have one.
    """

    name: str
    pivots: list[int]
    null: int
    deltas: list[int]

    @property
    def null_share(self) -> float:
        return self.null / max(self.null + sum(self.pivots), 1)

    @property
    def mean_delta(self) -> Interval | None:
        """With its 95% bootstrap interval; None without deltas."""
        return bootstrap_mean(self.deltas) if self.deltas else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, help="one training step; by default all of them")


def write(arguments: argparse.Namespace) -> Path:
    """Draws the figure and returns its path.

    Raises:
      FileNotFoundError: the workdir holds no run.
      ValueError: there are no rollouts, or none was graded.
    """
    subtasks = prepare(run_files.rollouts(arguments.workdir, arguments.step))
    name = "pivots" if arguments.step is None else f"pivots-{arguments.step}"
    return style.save(draw(subtasks), arguments.out, arguments.workdir, name)


def prepare(records: Sequence[Record]) -> list[Subtask]:
    """Counts over the graded rollouts, originals and retries.

    Raises:
      ValueError: none is graded.
    """
    graded = {record["uid"]: record for record in records if record["grades"]}
    if not graded:
        raise ValueError("no rollout is graded; pivots need condition rlds or base_reflection")
    turns = max(len(record["turns"]) for record in graded.values())
    return [_subtask(name, graded, turns) for name in next(iter(graded.values()))["grades"]]


def draw(subtasks: Sequence[Subtask]) -> Figure:
    """Pivot turns on the left, grade changes on the right, a row per subtask."""
    figure = Figure(figsize=(10, 1.2 + 0.75 * len(subtasks)), layout="constrained")
    grid = figure.add_gridspec(len(subtasks), 2, width_ratios=(1.1, 1), hspace=0.1, wspace=0.06)
    shared = None
    for row, subtask in enumerate(subtasks):
        shared = figure.add_subplot(grid[row, 0], sharex=shared, sharey=shared)
        _pivots(shared, subtask, last=row == len(subtasks) - 1)
    figure.axes[0].set_title(
        "Pivot turn, share of pivots", loc="left", fontsize=10, weight="bold", color=style.INK
    )
    axes = figure.add_subplot(grid[:, 1])
    _deltas(axes, subtasks)
    return figure


def _subtask(name: str, graded: Mapping[str, Record], turns: int) -> Subtask:
    pivots = [0] * turns
    null = 0
    deltas = []
    for record in graded.values():
        pivot = pivot_turns(record).get(name)
        if pivot is None:
            null += 1
        else:
            pivots[pivot] += 1
        before = graded.get(record["parent"])
        if before and None not in (record["grades"][name], before["grades"][name]):
            deltas.append(record["grades"][name] - before["grades"][name])
    return Subtask(name, pivots, null, deltas)


def _pivots(axes: Axes, subtask: Subtask, last: bool) -> None:
    total = sum(subtask.pivots)
    shares = np.array(subtask.pivots) / max(total, 1)
    axes.bar(range(len(shares)), shares, color=style.BLUE, width=0.82)
    style.quiet(axes, "")
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["", "", ""])
    axes.set_xticks(range(0, len(shares), 1 + len(shares) // 16))
    axes.tick_params(labelbottom=last, length=0)
    axes.set_ylabel(
        subtask.name.replace("_", " "), rotation=0, ha="right", va="center", fontsize=8.5
    )
    note = f"n = {total}, no pivot {subtask.null_share:.0%}"
    axes.text(0.99, 0.85, note, transform=axes.transAxes, ha="right", va="top", fontsize=8)
    if last:
        axes.set_xlabel("turn, counted from 0", fontsize=8.5)


def _deltas(axes: Axes, subtasks: Sequence[Subtask]) -> None:
    """Shares of worse and better grades as bars around no change, and the mean beside them."""
    colours = style.CREDIT(np.linspace(0, 1, len(DELTAS)))
    style.quiet(axes, "Retry's grade less its original's")
    for row, subtask in enumerate(subtasks):
        shares = {d: subtask.deltas.count(d) / max(len(subtask.deltas), 1) for d in DELTAS}
        left = -sum(shares[d] for d in DELTAS if d < 0) - shares[0] / 2
        for delta, colour in zip(DELTAS, colours, strict=True):
            colour = style.PALE if delta == 0 else colour
            axes.barh(row, shares[delta], left=left, color=colour, height=0.62)
            if shares[delta] > 0.07:
                middle = left + shares[delta] / 2
                axes.text(middle, row, _signed(delta), ha="center", va="center", fontsize=7.5)
            left += shares[delta]
        mean = subtask.mean_delta
        note = "no retries" if mean is None else _note(mean)
        axes.text(1.04, row, note, va="center", fontsize=8, transform=axes.get_yaxis_transform())
    axes.axvline(0, color=style.GREY, linewidth=0.8)
    axes.set_xlim(-1, 1)
    axes.set_ylim(len(subtasks) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_xticks([-1, -0.5, 0, 0.5, 1], ["100%", "50%", "0", "50%", "100%"])
    axes.set_xlabel("share of retries: worse to the left, better to the right", fontsize=8.5)


def _signed(delta: int) -> str:
    return f"{delta:+d}" if delta else "0"


def _note(mean: Interval) -> str:
    return f"mean {mean.mean:+.2f}\n[{mean.low:+.2f}, {mean.high:+.2f}]\nn = {mean.n}"
