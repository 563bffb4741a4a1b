"""Reads what a run left in its workdir; `RunLog` writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CONFIG = "config.json"

Scalars = dict[str, dict[int, float]]


def scalars(workdir: Path) -> Scalars:
    """Every scalar of TensorBoard by name and step; the last one where a step was run again.

    Raises:
      FileNotFoundError: the workdir holds no event file.
    """
    directory = workdir / "tensorboard"
    if not any(directory.glob("events.out.tfevents.*")):
        raise FileNotFoundError(f"{directory} holds no event file; give the workdir of a run")
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 1})
    events.Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


def validations(workdir: Path) -> list[dict[str, Any]]:
    """The records of validation.jsonl by ascending step, the last one of each step.

    Raises:
      FileNotFoundError: the workdir holds no run.
    """
    by_step = {record["step"]: record for record in _lines(workdir / "validation.jsonl")}
    return [by_step[step] for step in sorted(by_step)]


def rollouts(workdir: Path, step: int | None = None) -> list[dict[str, Any]]:
    """The records of rollouts.jsonl, of one step or of all; the last one of each rollout.

    Raises:
      FileNotFoundError: the workdir holds no run.
      ValueError: the step has none.
    """
    lines = _lines(workdir / "rollouts.jsonl")
    by_uid = {r["uid"]: r for r in lines if step is None or r["step"] == step}
    if not by_uid:
        which = "no rollouts" if step is None else f"no rollouts of step {step}"
        raise ValueError(f"{workdir / 'rollouts.jsonl'} holds {which}")
    return list(by_uid.values())


def config(workdir: Path) -> dict[str, Any]:
    """The run's config.

    Raises:
      FileNotFoundError: the workdir holds no run.
      ValueError: the file is damaged.
    """
    path = workdir / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the workdir of a run")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); bring it back from a copy") from error


def drop_after(path: Path, step: int) -> None:
    """Cuts a file of JSON lines before its first record of a later step, or broken line."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for line in file:
            try:
                whole = line.endswith(b"\n") and json.loads(line)["step"] <= step
            except ValueError:
                whole = False
            if not whole:
                break
            kept += len(line)
    os.truncate(path, kept)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file that may still be written to: half a last line is left out."""
    with path.open() as file:
        yield from (json.loads(line) for line in file if line.endswith("\n"))
