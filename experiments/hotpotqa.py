"""One RLDS run of configs/hotpotqa.py:tiny, and what it came to.

    python -m experiments.record hotpotqa experiments.hotpotqa

Prints the run's validations, and per logged quantity its means over the first and the last quarter
of the steps. The offline encyclopedia is made before the clock starts, where it is not there yet.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from configs.hotpotqa import get_config
from rlds_jax import run_files, summary
from rlds_jax.play import make_task
from rlds_jax.tasks.hotpotqa.task import SUBTASKS

MEASURED = (
    "critic/rewards/mean",
    "tools/valid_call_rate",
    "tools/calls_per_rollout",
    "grader/parse_rate",
    "retry/gen_ratio",
    "sdae/fallback_group_rate",
    "sdae/sign_disagreement_rate",
    *(f"subtask/hotpotqa/{s.name}/{what}" for s in SUBTASKS for what in ("grade", "pivot_step")),
)


def main() -> None:
    config = get_config("tiny")
    make_task(config.task).close()
    with tempfile.TemporaryDirectory() as directory:
        command = ["-m", "rlds_jax.train", "--config=configs/hotpotqa.py:tiny"]
        started = time.monotonic()
        subprocess.run(
            [sys.executable, *command, f"--workdir={directory}"], stdout=sys.stderr, check=True
        )
        seconds = time.monotonic() - started
        print(
            json.dumps({"seed": config.seed, "run_s": seconds, **read(Path(directory))}, indent=1)
        )


def read(workdir: Path) -> dict[str, Any]:
    """Validations and learning curves of a finished run."""
    scalars = run_files.scalars(workdir)
    curves = {name: [*scalars[name].values()] for name in MEASURED if name in scalars}
    return {
        "validations": [summary.score(record) for record in run_files.validations(workdir)],
        "first": {name: _mean(curve[: _quarter(curve)]) for name, curve in curves.items()},
        "last": {name: _mean(curve[-_quarter(curve) :]) for name, curve in curves.items()},
        "rewards": curves["critic/rewards/mean"],
    }


def _quarter(curve: list[float]) -> int:
    return max(1, len(curve) // 4)


def _mean(values: list[float]) -> float:
    return float(np.mean(values))


if __name__ == "__main__":
    main()
