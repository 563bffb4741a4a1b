"""TensorBoard event files, written without TensorFlow or torch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Events:
    """A TensorBoard event file in `directory`."""

    def __init__(self, directory: Path):
        self._writer = EventFileWriter(str(directory))

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
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
