"""What a run leaves in its workdir: TensorBoard, JSON lines, and the progress bar beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tqdm
from ml_collections import ConfigDict

from rlds_jax import run_files
from rlds_jax.events import Events
from rlds_jax.validation import Validation


class RunLog:
    """TensorBoard, `rollouts.jsonl`, `validation.jsonl` and a progress bar for one workdir.

    Args:
      workdir: where they are, or are made.
      config: of the run.
      restored: step of the checkpoint that the run goes on from; what was logged of later ones is
        dropped. None: everything is.

    Attributes:
      validations: records of the validations so far, by ascending step.

    Raises:
      OSError: here and in every method that logs, the workdir cannot be written.
    """

    def __init__(self, workdir: Path, config: ConfigDict, restored: int | None = None):
        workdir.mkdir(parents=True, exist_ok=True)
        rollouts, validations = (workdir / name for name in ("rollouts.jsonl", "validation.jsonl"))
        for path in (rollouts, validations):
            run_files.drop_after(path, -1 if restored is None else restored)
        self._rollouts, self._validations = rollouts.open("a"), validations.open("a")
        self.validations = run_files.validations(workdir)
        self._events = Events(workdir / "tensorboard", 0 if restored is None else restored + 1)
        self._events.hparams(config.to_dict())
        self._bar = tqdm.tqdm(
            total=config.steps, initial=restored or 0, unit="step", dynamic_ncols=True
        )

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
        record = outcome.record(step)
        self._validations.write(json.dumps(record) + "\n")
        self._validations.flush()
        self.validations.append(record)
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


class SilentLog(RunLog):
    """Of a process that leaves the writing to the first: it knows the validations alone."""

    def __init__(self) -> None:
        self.validations = []

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        pass

    def text(self, step: int, name: str, markdown: str) -> None:
        pass

    def rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        pass

    def validation(
        self, step: int, task: str, outcome: Validation, seconds: Mapping[str, float]
    ) -> None:
        self.validations.append(outcome.record(step))

    def progress(self, metrics: Mapping[str, float]) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass
