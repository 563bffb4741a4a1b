"""Shardings of parameters and batches on a device mesh."""

from __future__ import annotations

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rlds_jax.models.config import ModelConfig
from rlds_jax.models.partition import MESH_AXES, RULES, spec
from rlds_jax.models.qwen3 import parameter_table


def make_mesh(
    replica: int = 1, data: int = 1, fsdp: int = -1, tensor: int = 1, devices=None
) -> Mesh:
    """A mesh over all devices; one size may be -1: the devices the others leave.

    Args:
      replica: copies of the model on slices or hosts that only gradients cross.
      data: copies of the model within one of those.
      fsdp: devices that share one copy, each computing its own rows.
      tensor: devices that share the heads, the MLP and the rows of one.
      devices: by default those of `jax.devices()`.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [replica, data, fsdp, tensor]
    if sizes.count(-1) == 1:
        rest = -int(np.prod(sizes))
        sizes[sizes.index(-1)] = len(devices) // max(rest, 1)
    if min(sizes) < 1 or np.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh {dict(zip(MESH_AXES, sizes, strict=True))} does not match "
            f"{len(devices)} devices; one size may be -1"
        )
    return Mesh(np.asarray(devices).reshape(sizes), MESH_AXES)


def check_mesh(config: ModelConfig, mesh: Mesh | AbstractMesh, rows: int | None = None) -> None:
    """That a model and its batches divide over a mesh.

    Args:
      rows: of a micro-batch, where there are batches.

    Raises:
      ValueError: they do not; the message names the sizes that would.
    """
    tensor = mesh.shape["tensor"]
    sizes = (config.num_heads, config.num_kv_heads, config.intermediate_size)
    if any(size % tensor for size in sizes):
        fitting = [n for n in range(1, min(sizes) + 1) if not any(size % n for size in sizes)]
        raise ValueError(
            f"mesh.tensor is {tensor}, which does not divide the model's {sizes[0]} heads, "
            f"{sizes[1]} key-value heads and MLP width {sizes[2]}; use one of {fitting}"
        )
    ways = int(np.prod([mesh.shape[axis] for axis in RULES["rows"]]))
    if rows is not None and rows % ways:
        raise ValueError(
            f"batch.rows is {rows}; mesh.replica x mesh.data x mesh.fsdp spreads rows over {ways} "
            f"devices: use a multiple of {ways}, or raise mesh.tensor"
        )


def parameter_shardings(config: ModelConfig, mesh: Mesh):
    """A tree of shardings like the parameters, by the rules of models/partition.py."""
    flat = {
        path: NamedSharding(mesh, spec(mesh, parameter.axes, parameter.shape))
        for path, parameter in parameter_table(config).items()
    }
    return traverse_util.unflatten_dict(flat, sep="/")


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Of [max_micro, rows, row_length] arrays: rows spread over the mesh."""
    return NamedSharding(mesh, PartitionSpec(None, RULES["rows"]))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
