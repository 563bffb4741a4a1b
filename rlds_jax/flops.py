"""What a program multiplies and moves, counted on its jaxpr.

XLA's own analysis counts a scanned layer once, and for CUDA nothing ahead of time. Matrix products
are all that counts here: of a transformer's work they are more than 99%.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


@dataclasses.dataclass(frozen=True)
class Work:
    """Matrix products of a program.

    Attributes:
      flops: a multiply-add counts two; attention not included.
      attention: FLOPs of products whose operands or result span a row twice.
      bytes: read and written by all of them when nothing stays on the chip in between.
    """

    flops: float = 0.0
    attention: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops, self.attention + other.attention, self.bytes + other.bytes
        )

    def times(self, n: float) -> Work:
        return Work(self.flops * n, self.attention * n, self.bytes * n)


def count(function: Callable[..., Any], *args: Any, row_length: int | None = None) -> Work:
    """The work of function(*args), which are arrays or their shapes.

    The body of a scan counts once per iteration, that of any other loop once.

    Args:
      row_length: products of arrays that have this size twice are attention.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr, row_length)


def _count(jaxpr: core.Jaxpr, row_length: int | None) -> Work:
    total = Work()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _product(equation, row_length)
            continue
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        branches = [_count(inner, row_length) for inner in _inner(equation)]
        if equation.primitive.name == "cond":
            branches = [max(branches, key=lambda work: work.flops + work.attention)]
        for work in branches:
            total += work.times(repeats)
    return total


def _inner(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """The programs an equation runs; of a custom derivative, the primal."""
    if equation.primitive.name == "while":
        return [equation.params["body_jaxpr"].jaxpr]
    found: list[core.Jaxpr] = []
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, core.Jaxpr):
                found.append(item)
    return found


def _product(equation: core.JaxprEqn, row_length: int | None) -> Work:
    (contracting, _), _ = equation.params["dimension_numbers"]
    arrays: list[Any] = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    depth = math.prod(arrays[0].shape[axis] for axis in contracting)
    flops = 2.0 * depth * math.prod(arrays[-1].shape)
    if row_length and any(array.shape.count(row_length) > 1 for array in arrays):
        # Flash kernels keep what is quadratic on the chip.
        rows = (a for a in arrays if a.shape.count(row_length) < 2)
        return Work(attention=flops, bytes=float(sum(map(_bytes, rows))))
    return Work(flops=flops, bytes=float(sum(map(_bytes, arrays))))


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize
