"""The device mesh, and the one table that maps logical axes of arrays onto it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("replica", "data", "fsdp", "tensor")

# Logical axis -> the mesh axes it is split over.
RULES: dict[str, tuple[str, ...]] = {
    # parameters
    "layers": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    # activations
    "rows": ("replica", "data", "fsdp"),
    "tokens": ("replica", "data", "fsdp"),
    "hidden": (),
    # The head splits the vocabulary where the layers split tokens: a chunk's hidden states travel,
    # which are smaller than the unembedding and its gradient.
    "head_rows": ("replica", "data"),
    "head_vocab": ("fsdp", "tensor"),
}


def spec(
    mesh: Mesh | AbstractMesh, axes: Sequence[str | None], shape: Sequence[int]
) -> PartitionSpec:
    """How an array with these logical axes (None: whole) lies on a mesh.

    An axis whose size the mesh axes do not divide stays whole.
    """

    def split(name: str | None, size: int) -> tuple[str, ...] | str | None:
        names = RULES[name] if name is not None else ()
        parts = math.prod(mesh.shape[axis] for axis in names)
        if not names or size % parts:
            return None
        return names if len(names) > 1 else names[0]

    return PartitionSpec(*map(split, axes, shape))


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | None) -> jax.Array:
    """Pins an intermediate to the layout of its logical axes; as it is on a single device."""
    if mesh is None or mesh.size == 1:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec(mesh, axes, x.shape)))
