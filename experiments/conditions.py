"""RLDS, base_reflection and RLVR on the same FrozenLake boards, three seeds each.

    python -m experiments.conditions train             # 9 runs of some 5 minutes each
    python -m experiments.record conditions experiments.conditions summary

`train` goes on where it was stopped. Runs are compared at their best validations within a budget:
STEPS training steps, or the tokens that the longest RLDS run sampled in them (actor, grader and
reflector). The other conditions sample fewer tokens per step and train for as many steps more as
fit that budget; they are validated after the last of them too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.compare import paired_difference
from experiments.two_parts import train_or_summary
from rlds_jax import run_files
from rlds_jax.summary import score
from rlds_jax.validation import best, bootstrap_mean

ROOT = Path("runs/conditions")
STEPS = 30
TRAINED_STEPS = {"rlds": STEPS, "base_reflection": 31, "rlvr": 33}
SEEDS = (0, 1, 2)
DIAGNOSTICS = ("sign_disagreement_rate", "grpo_correlation", "token_advantage_std")
BASELINE = "rlvr"

Validation = Mapping[str, Any]


class Run(NamedTuple):
    """What is read of one run."""

    seed: int
    validations: list[dict[str, Any]]
    scalars: run_files.Scalars

    def sampled_tokens(self, steps: int) -> int:
        """Tokens that training sampled in the first `steps` steps, judges' included."""
        decoded = self.scalars["engine/decode_tokens"]
        return int(sum(tokens for step, tokens in decoded.items() if step <= steps))

    def best(self, *, steps: int | None = None, tokens: int | None = None) -> Validation:
        """The best validation within a number of steps or of sampled tokens."""
        within = [
            validation
            for validation in self.validations
            if (steps is None or validation["step"] <= steps)
            and (tokens is None or self.sampled_tokens(validation["step"]) <= tokens)
        ]
        found = best(within)
        assert found is not None  # that of step 0 is always within
        return found


def command(condition: str, seed: int) -> list[str]:
    """The arguments that follow `python`."""
    return [
        *("-m", "rlds_jax.train", f"--config=configs/frozenlake.py:tiny,{condition}"),
        f"--config.seed={seed}",
        f"--config.steps={TRAINED_STEPS[condition]}",
        f"--workdir={workdir(condition, seed)}",
    ]


def workdir(condition: str, seed: int) -> Path:
    return ROOT / f"{condition}-{seed}"


def train() -> None:
    for seed in SEEDS:
        for condition in TRAINED_STEPS:
            subprocess.run([sys.executable, *command(condition, seed)], check=True)


def read(condition: str, seed: int) -> Run:
    """One finished run.

    Raises:
      FileNotFoundError: there is no such run.
      ValueError: it is not finished.
    """
    directory = workdir(condition, seed)
    validations = run_files.validations(directory)
    last, steps = max((v["step"] for v in validations), default=0), TRAINED_STEPS[condition]
    if last < steps:
        raise ValueError(
            f"{directory} was validated up to step {last} of {steps}; `train` goes on with it"
        )
    return Run(seed, validations, run_files.scalars(directory))


def summary() -> dict[str, Any]:
    """Every run, and the conditions compared under both budgets."""
    runs = {condition: [read(condition, seed) for seed in SEEDS] for condition in TRAINED_STEPS}
    tokens = max(run.sampled_tokens(STEPS) for run in runs["rlds"])
    return {
        "steps": STEPS,
        "tokens": tokens,
        "equal_steps": compared({c: [run.best(steps=STEPS) for run in r] for c, r in runs.items()}),
        "equal_tokens": compared(
            {c: [run.best(tokens=tokens) for run in r] for c, r in runs.items()}
        ),
        "diagnostics": {
            name: [float(np.mean([*run.scalars[f"sdae/{name}"].values()])) for run in runs["rlds"]]
            for name in DIAGNOSTICS
        },
        "runs": [described(condition, run) for condition, each in runs.items() for run in each],
    }


def compared(found: Mapping[str, Sequence[Validation]]) -> dict[str, Any]:
    """Per condition its seeds' best validations, their mean, and the difference to BASELINE.

    Intervals are over the boards: a board's reward is averaged over the seeds first.

    Raises:
      ValueError: a seed lacks boards, whose rollouts were dropped.
    """
    for condition, validations in found.items():
        boards = [validation["rewards"].keys() for validation in validations]
        missing = set().union(*boards).difference(set(boards[0]).intersection(*boards[1:]))
        if missing:
            raise ValueError(f"{condition}: not every seed played the boards {sorted(missing)}")
    rewards = {
        condition: {
            board: float(np.mean([validation["rewards"][board] for validation in validations]))
            for board in validations[0]["rewards"]
        }
        for condition, validations in found.items()
    }
    return {
        condition: {
            "seeds": [validation["mean"] for validation in found[condition]],
            "steps": [validation["step"] for validation in found[condition]],
            "reward": bootstrap_mean([*by_board.values()])._asdict(),
            "difference": paired_difference(by_board, rewards[BASELINE])._asdict(),
        }
        for condition, by_board in rewards.items()
    }


def described(condition: str, run: Run) -> dict[str, Any]:
    """One run: how it was made, its validations, and what it sampled."""
    return {
        "command": " ".join(["python", *command(condition, run.seed)]),
        "seed": run.seed,
        "tokens_per_step": run.sampled_tokens(STEPS) / STEPS,
        "validations": [score(record) for record in run.validations],
    }


if __name__ == "__main__":
    train_or_summary(__doc__, train, summary)
