"""What SDAE costs, beside one read and one write of its token arrays.

    python -m experiments.benchmarks.sdae [--format=json] [--repeats=20]

Per shape (N rows, T tokens, K subtasks, S turns) the table gives the time of the jitted kernel, the
time of the floor (reading turn_ids [N, T] int32 and writing one [N, T] float32), their ratio, and
what the kernel has to move and compute at least: one read of turn_ids and two writes (masked and
unmasked advantages), and 6 N K S FLOPs for the kernels over turns. After the first shape one size
at a time grows by 2 and 4, so linear growth shows as at most that factor; the last shape is one
step of FrozenLake at the scale of METHOD section 5. Takes under a minute on two CPU cores.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from rlds_jax import sdae

FORMAT = flags.DEFINE_enum("format", "table", ["table", "json"], "How to print the result.")
REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls per shape; the best counts.")


class Shape(NamedTuple):
    """Rows, tokens, subtasks and turns."""

    rows: int
    tokens: int
    subtasks: int
    turns: int


BASE = Shape(rows=256, tokens=4096, subtasks=5, turns=16)
STEP = Shape(rows=1024, tokens=8192, subtasks=5, turns=16)
SHAPES = (
    BASE,
    *(BASE._replace(rows=factor * BASE.rows) for factor in (2, 4)),
    *(BASE._replace(tokens=factor * BASE.tokens) for factor in (2, 4)),
    *(BASE._replace(subtasks=factor * BASE.subtasks) for factor in (2, 4)),
    *(BASE._replace(turns=factor * BASE.turns) for factor in (2, 4)),
    STEP,
)


def make_batch(shape: Shape) -> tuple[jax.Array, ...]:
    """A batch of groups of nine rows; half the tokens are sampled, in turns of random length."""
    rng = np.random.default_rng(0)
    turn_ids = np.sort(rng.integers(0, shape.turns, (shape.rows, shape.tokens)), axis=1)
    turn_ids[rng.random(turn_ids.shape) < 0.5] = -1
    size = (shape.rows, shape.subtasks)
    arrays = (
        rng.random(shape.rows, np.float32),
        rng.integers(1, 6, size).astype(np.float32),
        rng.integers(-1, shape.turns, size),
        np.full(size, 1 / shape.subtasks, np.float32),
        np.arange(shape.rows) // 9,
        turn_ids,
        rng.integers(0, 2, shape.rows),
    )
    return tuple(jnp.array(x, x.dtype if x.dtype == np.float32 else np.int32) for x in arrays)


def best_seconds(function: Callable[..., Any], *args: jax.Array, repeats: int) -> float:
    """The best of several calls, after one that compiles."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def measure(shape: Shape, repeats: int) -> dict[str, float]:
    """Times one shape; see the module docstring for the columns."""
    batch = make_batch(shape)
    turn_ids = batch[5]
    kernel = jax.jit(
        lambda *args: sdae.advantages(*args, num_groups=shape.rows, num_turns=shape.turns)
    )
    floor = jax.jit(lambda x: x.astype(jnp.float32))
    kernel_seconds = best_seconds(kernel, *batch, repeats=repeats)
    floor_seconds = best_seconds(floor, turn_ids, repeats=repeats)
    tokens = shape.rows * shape.tokens
    return {
        **shape._asdict(),
        "kernel_ms": 1e3 * kernel_seconds,
        "floor_ms": 1e3 * floor_seconds,
        "ratio": kernel_seconds / floor_seconds,
        "ns_per_token": 1e9 * kernel_seconds / tokens,
        "least_bytes": 3 * 4 * tokens,
        "least_flops": 6 * shape.rows * shape.subtasks * shape.turns,
    }


def table(results: list[dict[str, float]]) -> str:
    """The results in columns, with the growth over the first row."""
    lines = [
        f"{'N':>6} {'T':>6} {'K':>3} {'S':>3} {'kernel ms':>10} {'floor ms':>9} {'ratio':>6} "
        f"{'ns/token':>9} {'growth':>7} {'MB':>7} {'MFLOP':>7}"
    ]
    for r in results:
        lines.append(
            f"{r['rows']:>6} {r['tokens']:>6} {r['subtasks']:>3} {r['turns']:>3} "
            f"{r['kernel_ms']:>10.2f} {r['floor_ms']:>9.2f} {r['ratio']:>6.1f} "
            f"{r['ns_per_token']:>9.2f} {r['kernel_ms'] / results[0]['kernel_ms']:>7.2f} "
            f"{r['least_bytes'] / 1e6:>7.1f} {r['least_flops'] / 1e6:>7.2f}"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    del argv
    results = [measure(shape, REPEATS.value) for shape in SHAPES]
    device = jax.devices()[0].device_kind
    if FORMAT.value == "json":
        print(json.dumps({"device": device, "results": results}, indent=1))
    else:
        print(f"SDAE on {device}, best of {REPEATS.value}")
        print(table(results))


if __name__ == "__main__":
    app.run(main)
