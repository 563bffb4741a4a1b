"""What a run leaves in its workdir: TensorBoard, JSON lines, and the progress bar beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tqdm
from ml_collections import ConfigDict

from rlds_jax.events import Events
from rlds_jax.validation import Validation


class RunLog:
    """TensorBoard, `rollouts.jsonl`, `validation.jsonl` and a progress bar for one workdir.

    Args:
      workdir: created if absent.
      config: of the run; kept as `config.json`.

    Raises:
      OSError: the workdir cannot be written.
      ValueError: the workdir already holds a run.
    """

    def __init__(self, workdir: Path, config: ConfigDict):
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / "rollouts.jsonl"
        if path.exists():
            raise ValueError(f"workdir {workdir} already holds a run; give another or remove it")
        (workdir / "config.json").write_text(config.to_json(indent=1) + "\n")
        self._events = Events(workdir / "tensorboard")
        self._events.hparams(config.to_dict())
        self._rollouts = path.open("x")
        self._validations = (workdir / "validation.jsonl").open("x")
        self._bar = tqdm.tqdm(total=config.steps, unit="step", dynamic_ncols=True)

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes scalars to TensorBoard; see `Events.scalars`."""
        self._events.scalars(step, metrics)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Writes a distribution to TensorBoard."""
        self._events.histogram(step, name, values)

    def text(self, step: int, name: str, markdown: str) -> None:
        """Writes a text to TensorBoard."""
        self._events.text(step, name, markdown)

    def rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Appends one JSON line per rollout."""
        for record in records:
            self._rollouts.write(json.dumps({"step": step, **record}) + "\n")
        self._rollouts.flush()

    def validation(
        self, step: int, task: str, outcome: Validation, seconds: Mapping[str, float]
    ) -> None:
        """Logs a validation: scalars, one JSON line with the reward of every item, and a line."""
        self.scalars(step, {**outcome.metrics(task), **seconds})
        self._validations.write(json.dumps(outcome.record(step)) + "\n")
        self._validations.flush()
        mean, low, high, n = outcome.reward
        self.say(f"validation at step {step}: reward {mean:.3f} [{low:.3f}, {high:.3f}], n = {n}")

    def progress(self, metrics: Mapping[str, float]) -> None:
        """Advances the bar by one step; tqdm adds the estimated time left."""
        shown = {
            "reward": metrics["critic/rewards/mean"],
            "graded": metrics.get("grader/parse_rate"),
            "retries": metrics.get("retry/count"),
        }
        text = {name: f"{value:.2f}" for name, value in shown.items() if value is not None}
        self._bar.set_postfix(text, refresh=False)
        self._bar.update()

    def say(self, line: str) -> None:
        """Prints a line above the progress bar."""
        self._bar.write(line)

    def close(self) -> None:
        self._bar.close()
        self._rollouts.close()
        self._validations.close()
        self._events.close()
