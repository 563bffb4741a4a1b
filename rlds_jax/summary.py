"""What a run came to: validation before and after, what a step took, what to do next."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlds_jax import checkpoint, run_files, validation

WHOLE_STEP = "perf/time_per_step"
# Whose samples, and the scalars whose product is their number of tokens in a step.
SAMPLED = {
    "gen": ("rollout/count", "response_length/sampled"),
    "grade": ("grader/count", "grader/response_length"),
    "reflect": ("reflector/count", "reflector/response_length"),
    "retry": ("retry/count", "response_length/sampled", "retry/gen_ratio"),
}


def write(workdir: Path) -> dict[str, Any]:
    """Writes `summary.json` from the run's logs, and returns it.

    Returns:
      steps: training steps taken: the last that was logged or saved.
      steps_unlogged: so many of them are missing in TensorBoard, and in the means below.
      val_before, val_after, best: mean reward with its 95% interval low and high over n items,
        and the step; of the untrained policy, the last and the best (the first of equals). None
        without validation.
      best_step: that of best.
      step_seconds: mean by phase, and "step" for the whole; the first step, which compiles, is left
        out. Phases overlap.
      sampled_tokens: mean per step by phase.
      fallback_group_rate, grader_parse_rate: means over the steps; None where nothing is graded.

    Raises:
      FileNotFoundError: the workdir holds no run.
    """
    scalars = run_files.scalars(workdir)
    validations = [score(record) for record in run_files.validations(workdir)]
    best = validation.best(validations)
    logged = scalars.get(WHOLE_STEP, {}).keys()
    saved = checkpoint.steps(workdir / "checkpoints")
    steps = max([*logged, *saved, *(v["step"] for v in validations)], default=0)
    summary = {
        "steps": steps,
        "steps_unlogged": steps - len(logged),
        "val_before": next((v for v in validations if v["step"] == 0), None),
        "val_after": next((v for v in reversed(validations) if v["step"] > 0), None),
        "best": best,
        "best_step": None if best is None else best["step"],
        "step_seconds": step_seconds(scalars),
        "sampled_tokens": sampled_tokens(scalars),
        "fallback_group_rate": _mean(scalars, "sdae/fallback_group_rate"),
        "grader_parse_rate": _mean(scalars, "grader/parse_rate"),
    }
    run_files.write_json(workdir / "summary.json", summary)
    return summary


def text(summary: Mapping[str, Any], workdir: Path) -> str:
    """The summary as lines to print, with the commands that follow a run."""
    where = shlex.quote(str(workdir))
    lines = [f"{summary['steps']} steps; logs, rollouts and summary.json are in {workdir}"]
    if summary["steps_unlogged"]:
        lines.append(f"TensorBoard lacks {summary['steps_unlogged']} of them, and so do the means")
    validations = [summary[name] for name in ("val_before", "val_after", "best")]
    for when, found in zip(("before", "after", "best"), validations, strict=True):
        if found is not None and not (when == "best" and found in validations[:2]):
            lines.append(f"validation {when:>6}: {_show(found)}")
    if summary["step_seconds"]:
        phases = [f"{name} {seconds:.2f}" for name, seconds in summary["step_seconds"].items()]
        lines.append(f"seconds a step (phases overlap): {', '.join(phases)}")
    rates = [
        f"{name.replace('_', ' ')} {summary[name]:.1%}"
        for name in ("grader_parse_rate", "fallback_group_rate")
        if summary[name] is not None
    ]
    lines += [", ".join(rates)] if rates else []
    return "\n".join([*lines, "next:", *(f"  {command}" for command in _commands(summary, where))])


def step_seconds(scalars: run_files.Scalars) -> dict[str, float]:
    """Mean seconds of each phase and of the whole step, over the steps after the first."""
    steps = sorted(scalars.get(WHOLE_STEP, {}))[1:]
    means = {"step": _mean_at(scalars.get(WHOLE_STEP, {}), steps)}
    for name in sorted(scalars):
        kind, _, phase = name.partition("/")
        if kind == "timing_s" and phase != "validation":
            means[phase] = _mean_at(scalars[name], steps)
    return {phase: mean for phase, mean in means.items() if mean is not None}


def sampled_tokens(scalars: run_files.Scalars) -> dict[str, float]:
    """Mean tokens that each phase of a step sampled; a phase that was not run is absent."""
    tokens = {}
    for phase, names in SAMPLED.items():
        factors = [scalars.get(name, {}) for name in names]
        steps = set(factors[0]).intersection(*factors)
        products = [math.prod([factor[step] for factor in factors]) for step in steps]
        if products:
            tokens[phase] = round(sum(products) / len(scalars[WHOLE_STEP]), 1)
    return tokens


def score(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a validation came to, without its items."""
    return {name: record[name] for name in ("step", "mean", "low", "high", "n")}


def _mean(scalars: run_files.Scalars, name: str) -> float | None:
    values = scalars.get(name, {})
    return _mean_at(values, sorted(values))


def _mean_at(values: Mapping[int, float], steps: Sequence[int]) -> float | None:
    present = [values[step] for step in steps if step in values]
    return sum(present) / len(present) if present else None


def _show(found: Mapping[str, Any]) -> str:
    interval = f"[{found['low']:.3f}, {found['high']:.3f}]"
    return f"reward {found['mean']:.3f} {interval}, n = {found['n']}, step {found['step']}"


def _python() -> str:
    """This interpreter as a command that works from here, whatever environment is active."""
    path = Path(sys.executable)
    return shlex.quote(
        str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    )


def _commands(summary: Mapping[str, Any], where: str) -> list[str]:
    python = _python()
    commands = [f"{python} -m tensorboard.main --logdir={where}/tensorboard"]
    if summary["steps"]:
        commands += [
            f"{python} -m experiments.figures credit --workdir={where} --step={summary['steps']}",
            f"{python} -m experiments.figures curves --workdir={where}",
        ]
    if summary["best_step"] is not None:
        commands.append(
            f"{python} -m rlds_jax.export --workdir={where} --step=best --out={where}/hf"
        )
    return commands
