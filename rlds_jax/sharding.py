"""The device mesh, and the one table that maps logical axes onto it."""

from __future__ import annotations

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlds_jax.models.config import ModelConfig
from rlds_jax.models.qwen3 import parameter_table

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis of a parameter -> mesh axis. An axis that does not divide stays whole.
RULES: dict[str, str | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
}


def make_mesh(data: int = 1, fsdp: int = -1, tensor: int = 1, devices=None) -> Mesh:
    """A (data, fsdp, tensor) mesh; one size may be -1: the devices the others leave.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) == 1:
        rest = -int(np.prod(sizes))
        sizes[sizes.index(-1)] = len(devices) // max(rest, 1)
    if min(sizes) < 1 or np.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh {dict(zip(MESH_AXES, sizes, strict=True))} does not match "
            f"{len(devices)} devices; one size may be -1"
        )
    return Mesh(np.asarray(devices).reshape(sizes), MESH_AXES)


def parameter_shardings(config: ModelConfig, mesh: Mesh):
    """A tree of shardings like the parameters, by RULES."""

    def axis(name: str, size: int) -> str | None:
        target = RULES[name]
        return target if target is not None and size % mesh.shape[target] == 0 else None

    flat = {
        path: NamedSharding(mesh, PartitionSpec(*map(axis, parameter.axes, parameter.shape)))
        for path, parameter in parameter_table(config).items()
    }
    return traverse_util.unflatten_dict(flat, sep="/")


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Of [max_micro, rows, row_length] arrays: rows spread over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
