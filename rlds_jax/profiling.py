"""Traces of chosen steps, for TensorBoard's profiler."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import jax


def parse_steps(text: str) -> range:
    """Reads "10:12", the steps from 10 to 12; "" is none.

    Raises:
      ValueError: it is something else.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if text and not 1 <= first <= last:
        raise ValueError(f"profile_steps is {text!r}; use two steps such as 10:12, or leave it out")
    return range(first, last + 1) if text else range(0)


@contextlib.contextmanager
def trace(step: int, traced: range, directory: Path) -> Iterator[None]:
    """Marks a training step, and writes a trace of it into `directory` if it is in `traced`.

    Python's own calls are left out: those of the rollouts would fill gigabytes.
    """
    with contextlib.ExitStack() as stack:
        if step in traced:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            stack.enter_context(jax.profiler.trace(directory, profiler_options=options))
        stack.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))
        yield
