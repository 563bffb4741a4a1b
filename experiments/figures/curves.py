"""The curves of a run: validation with its interval, rewards, grading, retries, KL."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.figures import style
from rlds_jax import run_files

# Title of a panel, and the scalars it shows by label.
PANELS: dict[str, dict[str, str]] = {
    "Training reward": {"originals": "critic/rewards/mean", "retries": "retry/rewards/mean"},
    "Success (retries are of failures)": {
        "originals": "rollout/success_rate",
        "retries": "retry/success_rate",
    },
    "Judges: valid answers": {
        "grader": "grader/parse_rate",
        "reflector": "reflection/valid_rate",
    },
    "Groups that fell back to GRPO": {"": "sdae/fallback_group_rate"},
    "KL to the reference": {"": "actor/kl_loss"},
}
LINES: tuple[dict[str, Any], ...] = (
    {"color": style.BLUE, "linestyle": "-"},
    {"color": style.GOLD, "linestyle": "--"},
)
SMOOTH_FROM = 30  # steps


class Curve(NamedTuple):
    """One line; `low` and `high` are empty where there is no interval."""

    label: str
    steps: list[int]
    values: list[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


class Panel(NamedTuple):
    """One pair of axes, from 0 to 1 where it shows rates; without curves where none is logged."""

    title: str
    curves: list[Curve]
    rates: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none of its own."""


def write(arguments: argparse.Namespace) -> Path:
    """Draws the figure and returns its path.

    Raises:
      FileNotFoundError: the workdir holds no run.
    """
    figure = draw(prepare(arguments.workdir))
    return style.save(figure, arguments.out, arguments.workdir, "curves")


def prepare(workdir: Path) -> list[Panel]:
    """The panels of a run: validation from validation.jsonl, the others from TensorBoard."""
    scalars = run_files.scalars(workdir)
    panels = [Panel("Validation reward, 95% interval", _validation(workdir))]
    for title, names in PANELS.items():
        curves = [
            Curve(label, *map(list, zip(*sorted(scalars[name].items()), strict=True)))
            for label, name in names.items()
            if name in scalars
        ]
        rates = all(name.endswith("_rate") for name in names.values())
        panels.append(Panel(title, curves, rates))
    return panels


def draw(panels: Sequence[Panel]) -> Figure:
    """Two rows of panels."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    all_axes = figure.subplots(2, (len(panels) + 1) // 2, sharex=True, squeeze=False)
    for axes, panel in zip(all_axes.flat, panels, strict=True):
        style.quiet(axes, panel.title)
        for curve, line in zip(panel.curves, LINES, strict=False):
            _draw(axes, curve, line)
        if not panel.curves:
            axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center")
        elif panel.rates:
            axes.set_ylim(-0.03, 1.03)
        if len(panel.curves) > 1:
            axes.legend(frameon=False, fontsize=8)
    for axes in all_axes[-1]:
        axes.set_xlabel("training step", fontsize=8.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def smooth(values: np.ndarray) -> np.ndarray:
    """[n]: the mean of each value and up to n // 20 neighbours on either side."""
    reach = len(values) // 20
    windows = (values[max(i - reach, 0) : i + reach + 1] for i in range(len(values)))
    return np.array([window.mean() for window in windows])


def _validation(workdir: Path) -> list[Curve]:
    records = run_files.validations(workdir)
    if not records:
        return []
    steps, mean, low, high = zip(
        *((r["step"], r["mean"], r["low"], r["high"]) for r in records), strict=True
    )
    return [Curve("", list(steps), list(mean), low, high)]


def _draw(axes: Axes, curve: Curve, line: Mapping[str, Any]) -> None:
    values = np.asarray(curve.values)
    long = len(values) >= SMOOTH_FROM
    if len(curve.low):
        shade = {"color": line["color"], "alpha": 0.18, "linewidth": 0}
        axes.fill_between(curve.steps, curve.low, curve.high, **shade)
    elif long:
        axes.plot(curve.steps, values, color=line["color"], alpha=0.3, linewidth=0.8)
        values = smooth(values)
    marker = "" if long else "o"
    axes.plot(curve.steps, values, label=curve.label, marker=marker, markersize=3, **line)
