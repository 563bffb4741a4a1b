"""What the processes of one run tell each other (DESIGN "Several hosts").

Every process takes the same steps in the same order and plays its own share of each step's items.
All of them then hold all rollouts, so that advantages, counts and batches are those of one process.
With one process nothing here communicates.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from rlds_jax import sharding

T = TypeVar("T")


def initialise(distributed: bool) -> None:
    """Joins the other processes, where there are any; before JAX has touched a device.

    Coordinator, number of processes and index come from the cluster (Slurm, Open MPI, Kubernetes,
    a TPU slice), or from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Raises:
      ValueError: they cannot be found, or the others cannot.
    """
    if not distributed:
        return
    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    try:
        count, index = (int(os.environ[name]) if name in os.environ else None for name in names)
        jax.distributed.initialize(num_processes=count, process_id=index)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"distributed is set, but jax.distributed cannot start: {error}; start the processes "
            f"by the cluster's own command, or give each JAX_COORDINATOR_ADDRESS, {names[0]} and "
            f"{names[1]}"
        ) from error


def share(n: int) -> range:
    """Which of n items this process plays."""
    return range(jax.process_index(), n, jax.process_count())


def interleave(played: Sequence[T]) -> list[T]:
    """What every process made of its share, in the order of the items."""
    shares = gather(played)
    return [shares[i % len(shares)][i // len(shares)] for i in range(sum(map(len, shares)))]


def gather(value: T) -> list[T]:
    """`value` of every process, in their order. Every process must call this."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(data))).tolist()
    longest = 1 << max(sizes).bit_length()  # every new length compiles anew
    everything = multihost_utils.process_allgather(np.pad(data, (0, longest - len(data))))
    return [pickle.loads(row[:n].tobytes()) for row, n in zip(everything, sizes, strict=True)]


def agree(function: Callable[[], T]) -> T:
    """`function()`, when every process has returned from its own.

    What one of them raises, a signal that ends the run included, is raised in all; of several the
    first process's.
    """
    if jax.process_count() == 1:
        return function()
    try:
        return function()
    finally:
        errors = gather(_portable(sys.exception()))
        for process, error in enumerate(errors):
            if error is not None and process != jax.process_index():
                raise error
            if error is not None:  # it is on its way
                break


def first(function: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`function()` in the first process, `otherwise()` in the others; as `agree`."""
    return agree(function if jax.process_index() == 0 else otherwise)


def whole(params: Any, mesh: Mesh, dtype: str) -> Any:
    """Parameters on the first device of this process, as `dtype`; of one process as they are."""
    if jax.process_count() == 1:
        return params
    return jax.tree.map(lambda x: x.addressable_data(0), _replicate(mesh, dtype)(params))


@functools.cache
def _replicate(mesh: Mesh, dtype: str) -> Callable[[Any], Any]:
    return jax.jit(
        lambda params: jax.tree.map(lambda x: x.astype(dtype), params),
        out_shardings=sharding.replicated(mesh),
    )


def _portable(error: BaseException | None) -> BaseException | None:
    """The error, or its text where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except (TypeError, AttributeError, pickle.PickleError):
        return RuntimeError(f"{type(error).__name__}: {error}")
