"""RLDS beside RLVR on the tiny ScienceWorld: one seeded run of each.

    python -m experiments.scienceworld train             # two runs of some ten minutes each
    python -m experiments.record scienceworld_conditions experiments.scienceworld summary

`train` goes on where it was stopped. One run says what a step costs, how long retries are and where
the grader puts pivots; it does not say which condition is better.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.two_parts import train_or_summary
from rlds_jax import run_files, summary

ROOT = Path("runs/scienceworld")
CONDITIONS = ("rlds", "rlvr")
SEED = 0
RATIOS = ("retry/gen_ratio", "retry/gen_time_ratio", "retry/from_step/mean", "num_turns/mean")
DIAGNOSTICS = (
    *("grader/parse_rate", "reflection/valid_rate", "retry/success_rate", "retry/improved_rate"),
    *("rollout/success_rate", "rollout/env_error", "retry/replay_diverged"),
    *("sdae/sign_disagreement_rate", "sdae/grpo_correlation", "sdae/token_advantage_std"),
)


def command(condition: str) -> list[str]:
    """The arguments that follow `python`."""
    return [
        *("-m", "rlds_jax.train", f"--config=configs/scienceworld.py:tiny,{condition}"),
        f"--config.seed={SEED}",
        f"--workdir={ROOT / condition}",
    ]


def train() -> None:
    for condition in CONDITIONS:
        subprocess.run([sys.executable, *command(condition)], check=True)


def described(condition: str) -> dict[str, Any]:
    """How a run was made, what its steps took, and its validations."""
    workdir = ROOT / condition
    scalars = run_files.scalars(workdir)
    found = summary.write(workdir)
    return {
        "command": " ".join(["python", *command(condition)]),
        "seed": SEED,
        "validations": [summary.score(record) for record in run_files.validations(workdir)],
        **{name: found[name] for name in ("steps", "step_seconds", "sampled_tokens")},
        "means": {
            name: float(np.mean([*scalars[name].values()]))
            for name in (*RATIOS, *DIAGNOSTICS)
            if name in scalars
        },
    }


def pivots(rollouts: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Per subtask, over the graded rollouts: the mean grade, the share that has a pivot, and the
    pivot's mean turn and mean place in the episode, from 0 (first turn) to 1 (last)."""
    graded = [rollout for rollout in rollouts if rollout["grades"]]
    found: dict[str, dict[str, float | None]] = {}
    for name in graded[0]["grades"] if graded else ():
        grades = [r["grades"][name] for r in graded if r["grades"][name] is not None]
        turns = [(r["pivots"][name], len(r["turns"])) for r in graded]
        given = [(turn, count) for turn, count in turns if turn is not None]
        found[name] = {
            "grade": float(np.mean(grades)),
            "with_pivot": len(given) / len(turns),
            "turn": float(np.mean([turn for turn, _ in given])) if given else None,
            "place": float(np.mean([turn / max(1, n - 1) for turn, n in given])) if given else None,
        }
    return found


def summarised() -> dict[str, Any]:
    """Both runs, and the pivots of RLDS."""
    return {
        "runs": {condition: described(condition) for condition in CONDITIONS},
        "pivots": pivots(run_files.rollouts(ROOT / "rlds")),
    }


if __name__ == "__main__":
    train_or_summary(__doc__, train, summarised)
