"""TensorBoard event files, written without TensorFlow or torch."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter


class Events:
    """A new TensorBoard event file in `directory`, written at once.

    Args:
      directory: created if absent.
      first_step: TensorBoard forgets what earlier files of the directory say of this step and
        later ones.

    Raises:
      OSError: here and in every method, the file cannot be written.
    """

    def __init__(self, directory: Path, first_step: int = 0):
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("xb")
        self._records = RecordWriter(self._file)
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes every scalar at `step`.

        Raises:
          ValueError: a metric is not finite; the names are listed.
        """
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        if wrong:
            raise ValueError(f"step {step}: metrics {wrong} are not finite")
        values = [Summary.Value(tag=name, simple_value=x) for name, x in metrics.items()]
        self._write(step, Summary(value=values))

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Writes the distribution of `values`, of any shape."""
        self._write(step, histogram_pb(name, values))

    def text(self, step: int, name: str, markdown: str) -> None:
        """Writes a text, which TensorBoard shows as markdown."""
        self._write(step, text_pb(name, markdown.encode(errors="replace")))

    def hparams(self, config: Mapping[str, Any]) -> None:
        """Writes the fields of a nested config, for the table of runs.

        TensorBoard finds out itself which differ between the runs it shows, and offers every
        scalar as a metric beside them; a list of either, written here, would switch that off.
        """
        self._write(0, hparams_pb(flat(config)))

    def _write(self, step: int, summary: Summary) -> None:
        self._add(Event(step=step, summary=summary))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def flat(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The fields of a nested config by dotted name; None is left out, a list becomes text."""
    fields = traverse_util.flatten_dict(dict(config), sep=".")
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in fields.items()
        if value is not None
    }
