"""Compares finished runs at their best validations (METHOD section 4).

    python -m experiments.compare runs/rlds runs/rlvr

The first run is compared with each of the others: difference of the mean validation rewards, and
its 95% interval by a paired bootstrap over the items.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlds_jax import commands, run_files
from rlds_jax.validation import Interval, best, bootstrap_mean
from rlds_jax.workdir import differences

Rewards = Mapping[str, float]


def paired_difference(a: Rewards, b: Rewards, resamples: int = 1000) -> Interval:
    """Mean of a - b over the items, with its paired bootstrap interval.

    Raises:
      ValueError: the runs were not validated on the same items.
    """
    if a.keys() != b.keys():
        raise ValueError(
            f"the validations share {len(a.keys() & b.keys())} items of {len(a)} and {len(b)}; "
            "compare runs of the same task and validation.num_items, without dropped rollouts"
        )
    return bootstrap_mean([a[item] - b[item] for item in a], resamples)


def best_of(workdir: Path) -> Mapping[str, Any]:
    """The run's best validation.

    Raises:
      FileNotFoundError: the workdir holds no run.
      ValueError: the run was never validated.
    """
    found = best(run_files.validations(workdir))
    if found is None:
        raise ValueError(f"{workdir} was never validated; set validation.every")
    return found


def check_items(first: Path, other: Path) -> None:
    """Item ids name the same boards in runs of one task alone.

    Raises:
      OSError, ValueError: a config cannot be read, or the runs' tasks or validations differ.
    """
    wrong = differences(*(_of_items(run_files.config(workdir)) for workdir in (first, other)))
    if wrong:
        raise ValueError(
            f"{first} and {other} were not validated on the same items, so they cannot be paired:"
            "\n  " + "\n  ".join(wrong)
        )


def _of_items(config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("num_items", "seed")
    return {
        "task": config["task"],
        "validation": {name: config["validation"][name] for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("workdirs", type=Path, nargs="+", metavar="WORKDIR")
    with commands.refuse_bad_input():
        workdirs = parser.parse_args().workdirs
        if len({workdir.resolve() for workdir in workdirs}) < len(workdirs):
            raise ValueError("a workdir is given twice; give other runs to compare the first with")
        found = {workdir: best_of(workdir) for workdir in workdirs}
        for workdir, outcome in found.items():
            print(
                f"{workdir}: {outcome['mean']:.3f} [{outcome['low']:.3f}, {outcome['high']:.3f}] "
                f"at step {outcome['step']}, n = {outcome['n']}"
            )
        first, *others = found
        for other in others:
            check_items(first, other)
            mean, low, high, _ = paired_difference(found[first]["rewards"], found[other]["rewards"])
            print(f"{first} - {other}: {mean:+.3f} [{low:+.3f}, {high:+.3f}]")


if __name__ == "__main__":
    main()
