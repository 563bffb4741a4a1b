"""The demo rolled out by vLLM and by the local engine, from the same seed: do they learn alike?

    make sidecar
    python -m experiments.engines train                # two runs
    python -m experiments.record engines experiments.engines summary

`train` goes on where it was stopped. The engines draw from the same distributions with different
random numbers, so the runs are compared by the intervals of their validations.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.compare import paired_difference
from experiments.two_parts import train_or_summary
from rlds_jax import run_files
from rlds_jax.rollouts.engines.vllm_config import VLLM_VERSION
from rlds_jax.summary import step_seconds

ROOT = Path("runs/engines")
VARIANTS = {"local": "tiny", "vllm": "tiny,vllm"}
SEED = 0


def command(engine: str) -> list[str]:
    """The arguments that follow `python`."""
    return [
        *("-m", "rlds_jax.train", f"--config=configs/frozenlake.py:{VARIANTS[engine]}"),
        f"--config.seed={SEED}",
        f"--workdir={ROOT / engine}",
    ]


def train() -> None:
    for engine in VARIANTS:
        subprocess.run([sys.executable, *command(engine)], check=True)


def summary() -> dict[str, Any]:
    """Both runs' validations, their differences board by board, and how well vLLM agreed."""
    validations = {engine: run_files.validations(ROOT / engine) for engine in VARIANTS}
    scalars = {engine: run_files.scalars(ROOT / engine) for engine in VARIANTS}
    return {
        "seed": SEED,
        "vllm": VLLM_VERSION,
        "steps": compared(validations["local"], validations["vllm"]),
        "commands": {engine: " ".join(["python", *command(engine)]) for engine in VARIANTS},
        "step_seconds": {engine: step_seconds(found) for engine, found in scalars.items()},
        "agreement": agreement(scalars["vllm"]),
    }


def compared(
    local: Sequence[Mapping[str, Any]], vllm: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Per validated step: each engine's mean with its interval, and vLLM's less the local one's.

    Raises:
      ValueError: the runs were not validated at the same steps, or not on the same boards.
    """
    if [v["step"] for v in local] != [v["step"] for v in vllm]:
        raise ValueError(f"a run in {ROOT} is not finished; `train` goes on with it")
    return [
        {
            "step": ours["step"],
            "local": _interval(ours),
            "vllm": _interval(theirs),
            "difference": paired_difference(theirs["rewards"], ours["rewards"])._asdict(),
        }
        for ours, theirs in zip(local, vllm, strict=True)
    ]


def agreement(scalars: run_files.Scalars) -> dict[str, float]:
    """Sampler against trainer, the worst of all steps."""
    names = ("logprob_diff_mean", "logprob_diff_max", "rollout_is_truncated")
    found = {name: max(scalars[f"rollout_corr/{name}"].values()) for name in names}
    return found | {"restarts": sum(scalars["engine/restarts"].values())}


def _interval(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("mean", "low", "high", "n")}


if __name__ == "__main__":
    train_or_summary(__doc__, train, summary)
