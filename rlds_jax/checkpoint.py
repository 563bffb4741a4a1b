"""Checkpoints of a run: what it needs to go on exactly, written by orbax beside the training.

A checkpoint becomes visible whole or not at all, with the size and CRC-32 of each of its files, so
that one damaged later is told from a good one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from rlds_jax.update import TrainState

log = logging.getLogger(__name__)

DIGEST = "digest.json"
ITEMS = ("params", "optimizer", "extra")
_STEP = re.compile(r"0|[1-9][0-9]*")
_UNFINISHED = re.compile(r"[0-9]+\.orbax-checkpoint-tmp")  # every other name is somebody else's
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved, besides at a new best validation, the last step and on SIGTERM.

    Attributes:
      every: steps between checkpoints; 0 leaves these out.
      keep: so many of the latest are kept, and the best.

    Raises:
      ValueError: naming the field that is out of range.
    """

    every: int = 10
    keep: int = 2

    def __post_init__(self):
        for name, least in (("every", 0), ("keep", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"checkpoint.{name} is {getattr(self, name)}; it must be at least {least}"
                )

    def due(self, step: int, steps: int) -> bool:
        """Whether the state after `step` of `steps` is saved whatever its validation."""
        regular = self.every > 0 and step > 0 and step % self.every == 0
        return regular or step == steps


class CheckpointError(OSError):
    """A checkpoint could not be written, or none can be read."""


class Restored(NamedTuple):
    """A checkpoint: the state after `step` steps, and what the loop carries beside it."""

    step: int
    state: TrainState
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints in `directory`, of one running trainer, in each of its processes.

    Unfinished ones are removed. The parameters are an item of their own, so that `load_params` can
    read them alone.
    """

    def __init__(self, directory: Path, keep: int):
        self._directory = directory
        self._kept = _LatestAndBest(keep)
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_not_of_orbax)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                for unfinished in _unfinished(directory):
                    shutil.rmtree(unfinished)
            self._manager = ocp.CheckpointManager(
                directory.resolve(),
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=self._kept,
                    async_options=ocp.AsyncOptions(post_finalization_callback=self._digest),
                ),
            )
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be used: {error}") from error

    def restore(self, abstract: TrainState) -> Restored | None:
        """The newest whole checkpoint, None if nothing was saved.

        Damaged newer ones are renamed, to `<step>.damaged-<n>`.

        Args:
          abstract: shapes, dtypes and shardings of the state.

        Raises:
          CheckpointError: all are damaged.
        """
        faults = {}
        for step in reversed(steps(self._directory)):
            path = self._directory / str(step)
            fault = find_fault(path)
            if fault is None:
                try:
                    found = _restored(step, path, abstract)
                    break
                except (OSError, ValueError, KeyError) as error:
                    fault = f"it cannot be read: {error}"
            faults[step] = fault
            log.warning("checkpoint %s is damaged and not used: %s", step, fault)
        else:
            if faults:
                raise CheckpointError(
                    f"{self._directory}: every checkpoint is damaged ({faults}); bring one back "
                    "from a copy, or remove the workdir to start over"
                )
            return None
        if jax.process_index() == 0:
            for damaged in faults:
                _put_aside(self._directory / str(damaged))
        self._manager.reload()
        return found

    def save(self, step: int, state: TrainState, best: int | None, **extra: Any) -> None:
        """Starts to write the state after `step` steps, unless that is there already.

        It is copied before this returns, so that its arrays may be donated.

        Args:
          best: step of the best validation so far, whose checkpoint is kept.
          extra: JSON values.

        Raises:
          CheckpointError: this or the last one could not be written.
        """
        self._kept.best = best
        if step in self._manager.all_steps():
            return
        needed = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
        free = shutil.disk_usage(self._directory).free
        if free < needed:  # before orbax meets it in the background
            raise CheckpointError(
                f"{self._directory}: the checkpoint of step {step} takes {needed:,} bytes and "
                f"{free:,} are left"
            )
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            optimizer=ocp.args.StandardSave(_beside_params(state)),
            extra=ocp.args.JsonSave(extra),
        )
        try:
            self._manager.save(step, args=items)
        except (OSError, ValueError, RuntimeError) as error:  # tensorstore's are ValueErrors
            raise self._unwritten(error) from error

    def wait(self) -> None:
        """Returns when everything is on disk.

        Raises:
          CheckpointError: it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._unwritten(error) from error

    def check(self) -> None:
        """Does not wait.

        Raises:
          CheckpointError: a checkpoint could not be written.
        """
        try:
            self._manager.check_for_errors()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._unwritten(error) from error

    def close(self) -> None:
        """Waits and stops; what could not be written has been reported by then."""
        self._manager.close()

    def _digest(self) -> None:
        """Runs before orbax renames the checkpoint to its final name."""
        for directory in _unfinished(self._directory):
            files = [path for path in directory.glob("*/**/*") if path.is_file()]  # of the items
            digest = {str(p.relative_to(directory)): [p.stat().st_size, _crc32(p)] for p in files}
            with (directory / DIGEST).open("w") as file:
                file.write(json.dumps(digest, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def _unwritten(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self._directory}: a checkpoint could not be written: {error}")


def steps(directory: Path) -> list[int]:
    """The steps that have a checkpoint in `directory`, ascending."""
    return sorted(int(path.name) for path in directory.glob("*") if _STEP.fullmatch(path.name))


def load_params(directory: Path, step: int, abstract: Any) -> Any:
    """The parameters of one checkpoint.

    Args:
      directory: of the checkpoints.
      abstract: shapes, dtypes and shardings of the parameters.

    Raises:
      CheckpointError: there is none of that step, or it is damaged.
    """
    path = directory / str(step)
    if not path.is_dir():
        there = f"but of {steps(directory)}" if steps(directory) else "and no other"
        raise CheckpointError(f"{directory} holds no checkpoint of step {step}, {there}")
    fault = find_fault(path)
    if fault:
        raise CheckpointError(f"{path} is damaged: {fault}; take another step")
    return _load(path / "params", abstract)


def abstract_like(tree: Any, shardings: Any) -> Any:
    """Shapes and dtypes of `tree` with `shardings`, for `restore` and `load_params`."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def find_fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, None if they are as they were written."""
    try:
        digest = json.loads((checkpoint / DIGEST).read_text())
    except (OSError, ValueError) as error:
        return f"{DIGEST} cannot be read: {error}"
    if not _is_digest(digest):
        return f"{DIGEST} does not list the files of {', '.join(ITEMS)}"
    for name, (size, crc) in digest.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size or _crc32(path) != crc:
            return f"{name} is not as it was written"
    return None


@dataclasses.dataclass
class _LatestAndBest:
    """Orbax's preservation policy: the latest `keep` checkpoints, and that of step `best`."""

    keep: int
    best: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        latest = {checkpoint.step for checkpoint in checkpoints[-self.keep :]}
        return [c.step in latest or c.step == self.best for c in checkpoints]


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Its threads and tasks log, with tracebacks, what `check` and `wait` raise as one error."""
    of_task = record.name == "asyncio" and "/orbax/" in record.getMessage()
    return not of_task and "orbax" not in Path(record.pathname).parts


def _is_digest(digest: Any) -> bool:
    return (
        isinstance(digest, dict)
        and {name.split("/")[0] for name in digest} >= {*ITEMS}
        and all(
            isinstance(entry, list) and [type(number) for number in entry] == [int, int]
            for entry in digest.values()
        )
    )


def _unfinished(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if _UNFINISHED.match(path.name)]


def _put_aside(path: Path) -> None:
    names = (path.with_name(f"{path.name}.damaged-{n}") for n in itertools.count(1))
    path.rename(next(name for name in names if not name.exists()))


def _beside_params(state: TrainState) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(TrainState) if field.name != "params")
    return {name: getattr(state, name) for name in names}


def _restored(step: int, path: Path, abstract: TrainState) -> Restored:
    params = _load(path / "params", abstract.params)
    beside = _load(path / "optimizer", _beside_params(abstract))
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        extra = reader.restore((path / "extra").resolve())
    return Restored(step, TrainState(params=params, **beside), extra)


def _load(item: Path, abstract: Any) -> Any:
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(item.resolve(), abstract)


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
