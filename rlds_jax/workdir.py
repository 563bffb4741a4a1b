"""A run's directory: claimed by one process, for one config."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from flax import traverse_util
from ml_collections import ConfigDict

from rlds_jax import run_files

# What a resumed run may change: none of it enters the numbers of the steps that were taken.
FREE = ("steps", "checkpoint.", "mesh.")


def claim(workdir: Path, config: ConfigDict) -> TextIO:
    """Makes the directory, or goes on with it, and keeps `config` in it.

    Returns:
      A lock, to be closed at the end of the run; it goes with the process.

    Raises:
      OSError: the directory cannot be written.
      ValueError: another process uses it, or it belongs to a run of another config.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    lock = (workdir / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"workdir {workdir} is in use by a running process") from None
    new = json.loads(config.to_json())  # as it is read back: lists for tuples
    path = workdir / run_files.CONFIG
    if path.exists():
        wrong = differences(run_files.config(workdir), new)
        if wrong:
            lock.close()
            raise ValueError(
                f"workdir {workdir} belongs to a run of another config; give another workdir, or "
                "set what differs back:\n  " + "\n  ".join(wrong)
            )
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
    os.replace(temporary, path)
    return lock


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
