"""A run's directory: claimed by one process, for one config."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
from flax import traverse_util
from ml_collections import ConfigDict

from rlds_jax import run_files

# What a resumed run may change: none of it enters the numbers of the steps that were taken.
FREE = ("steps", "checkpoint.", "mesh.", "batch.max_micro", "profile_steps", "distributed")
# What a resumed run changes or removes, so that it must be a run's own.
MADE = ("checkpoints", "rollouts.jsonl", "validation.jsonl", "tensorboard")


def claim(workdir: Path, config: ConfigDict) -> TextIO:
    """Makes the directory, or goes on with it, and keeps `config` in it.

    Returns:
      A lock, to be closed at the end of the run; it goes with the process.

    Raises:
      OSError: the directory cannot be written.
      ValueError: another process uses it, it belongs to a run of another config that has results,
        or it holds such files and no config.
    """
    path = workdir / run_files.CONFIG
    made = [name for name in MADE if (workdir / name).exists()]
    if made and not path.exists():
        raise ValueError(
            f"workdir {workdir} holds {', '.join(made)} but no {run_files.CONFIG}, so they may not "
            "be a run's; give a new directory, or bring the file back"
        )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / "lock").open("a")
    except OSError as error:
        raise OSError(
            f"workdir {workdir} cannot be made or written ({error}); give another"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"workdir {workdir} is in use by a running process") from None
    new = json.loads(config.to_json(sort_keys=True))  # as it is read back: lists for tuples
    if path.exists():
        old = run_files.config(workdir)
        wrong = differences(old, new)
        # A start that came to nothing binds no config; a model directory's is no run's.
        if wrong and (has_results(workdir) or old.keys() != new.keys()):
            lock.close()
            raise ValueError(
                f"workdir {workdir} belongs to a run of another config; give another workdir, or "
                "set what differs back:\n  " + "\n  ".join(wrong)
            )
    run_files.write_json(path, new)
    return lock


def keep_compilations(workdir: Path) -> None:
    """Compiled programs are kept in the workdir, or where JAX_COMPILATION_CACHE_DIR says."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(workdir / "compilations"))


def has_results(workdir: Path) -> bool:
    """Whether a run in `workdir` came far enough to save or to log anything of a step."""
    logs = (workdir / name for name in ("rollouts.jsonl", "validation.jsonl"))
    return any((workdir / "checkpoints").glob("*")) or any(
        path.exists() and path.stat().st_size > 0 for path in logs
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The fields that a resumed run may not change but does, as `name: old -> new`."""
    before, after = (
        traverse_util.flatten_dict(config, keep_empty_nodes=True, sep=".") for config in (old, new)
    )
    return [
        f"{name}: {before.get(name, 'absent')} -> {after.get(name, 'absent')}"
        for name in sorted(before.keys() | after.keys())
        if not name.startswith(FREE)
        and (name not in before or name not in after or before[name] != after[name])
    ]
