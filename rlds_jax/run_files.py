"""Reads what a run left in its workdir; `RunLog` writes it."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

log = logging.getLogger(__name__)

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
      ValueError: a line is damaged.
    """
    by_step = {record["step"]: record for record in _lines(workdir / "validation.jsonl")}
    return [by_step[step] for step in sorted(by_step)]


def rollouts(workdir: Path, step: int | None = None) -> list[dict[str, Any]]:
    """The records of rollouts.jsonl, of one step or of all; the last one of each rollout.

    Raises:
      FileNotFoundError: the workdir holds no run.
      ValueError: the step has none, or a line is damaged.
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
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); bring it back from a copy") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (it holds no fields); bring it back from a copy")
    return found


def write_json(path: Path, value: Any) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


def drop_after(path: Path, step: int) -> None:
    """Removes from a file of JSON lines the records of later steps, and what is no record."""
    if not path.exists():
        return
    kept, damaged = [], []  # of each line: whether it stays, and how long it is
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = _record(line)
            kept.append((record is not None and record["step"] <= step, len(line)))
            if record is None and line.endswith(b"\n"):  # not a last line that a kill cut
                damaged.append(number)
    staying = [*itertools.takewhile(lambda line: line[0], kept)]
    if any(stays for stays, _ in kept[len(staying) :]):
        _filter(path, [stays for stays, _ in kept])
    else:  # needs no room on the disk
        os.truncate(path, sum(length for _, length in staying))
    if damaged:
        log.warning("%s: %s damaged lines are dropped: %s", path, len(damaged), damaged)


def _filter(path: Path, stays: Sequence[bool]) -> None:
    """Keeps some lines of a file."""
    temporary = path.with_name(f"{path.name}.tmp")
    with path.open("rb") as file, temporary.open("wb") as rest:
        rest.writelines(itertools.compress(file, stays))
        rest.flush()
        os.fsync(rest.fileno())
    os.replace(temporary, path)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file that may still be written to: half a last line is left out.

    Raises:
      FileNotFoundError: there is none.
      ValueError: a line is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the workdir of a run")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = _record(line)
            if record is not None:
                yield record
            elif line.endswith(b"\n"):
                raise ValueError(
                    f"{path}:{number} is damaged; remove the line (going on with the run does too)"
                )


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line, None if it holds none or is cut."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line.decode())
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
