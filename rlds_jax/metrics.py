"""Where a run's numbers go: TensorBoard, a progress bar, and rollouts as JSON lines."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import tqdm
from ml_collections import ConfigDict
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rlds_jax.models.config import ModelConfig
from rlds_jax.validation import Validation

# Dense bf16 peak of one device, FLOP/s, by a part of jax's device_kind.
PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def train_flops(config: ModelConfig, lengths: Iterable[int]) -> float:
    """Forward and backward FLOPs of one pass over sequences of these lengths.

    A multiply-add counts two; backward counts twice the forward; causal attention counts the half
    it needs; recomputation under remat is not counted (the convention of MFU).
    """
    attention_width = config.num_heads * config.head_dim
    per_layer = (
        2 * config.hidden_size * (attention_width + config.num_kv_heads * config.head_dim)
        + 3 * config.hidden_size * config.intermediate_size
    )
    weights = config.num_layers * per_layer + config.hidden_size * config.vocab_size
    lengths = list(lengths)
    quadratic = sum(length * length for length in lengths)
    return 6.0 * weights * sum(lengths) + 6.0 * config.num_layers * attention_width * quadratic


def mfu(flops: float, seconds: float) -> float | None:
    """Model FLOPs utilisation over all devices; None where the device's peak is not known."""
    device = jax.devices()[0]
    for kind, peak in PEAK_FLOPS.items():
        if kind in device.device_kind:
            return flops / (seconds * peak * jax.device_count())
    return None


class Scalars:
    """A TensorBoard event file of scalars in `directory`."""

    def __init__(self, directory: Path):
        self._writer = EventFileWriter(str(directory))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes every scalar at `step`.

        Raises:
          ValueError: a metric is not finite; the names are listed.
        """
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        if wrong:
            raise ValueError(f"step {step}: metrics {wrong} are not finite")
        values = [Summary.Value(tag=name, simple_value=x) for name, x in metrics.items()]
        summary = Summary(value=values)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


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
        self._scalars = Scalars(workdir / "tensorboard")
        self._rollouts = path.open("x")
        self._validations = (workdir / "validation.jsonl").open("x")
        self._bar = tqdm.tqdm(total=config.steps, unit="step", dynamic_ncols=True)

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes scalars to TensorBoard; see `Scalars.write`."""
        self._scalars.write(step, metrics)

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
        self._scalars.close()
