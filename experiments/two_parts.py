"""The command of an experiment whose runs are made first, and summed up once they are there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from rlds_jax import commands


def train_or_summary(
    doc: str | None, train: Callable[[], None], summary: Callable[[], dict[str, Any]]
) -> None:
    """`train` makes the runs, `summary` prints JSON; the first line of `doc` describes both."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("what", choices=("train", "summary"))
    if parser.parse_args().what == "train":
        train()
        return
    with commands.refuse_bad_input():
        print(json.dumps(summary(), indent=1))
