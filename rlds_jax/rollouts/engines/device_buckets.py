"""A policy's tensors packed into buckets in device memory: the bytes of those on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from rlds_jax.models.config import ModelConfig
from rlds_jax.models.qwen3 import Params
from rlds_jax.rollouts.engines.vllm_config import VllmConfig
from rlds_jax.rollouts.engines.weight_buckets import Layout, Slot, turned


class DeviceBuckets:
    """Bucket after bucket, each whole on every device of the parameters' mesh.

    Attributes:
      capacity: bytes of a bucket.
      total_bytes: of all tensors.
    """

    def __init__(self, config: VllmConfig, model: ModelConfig):
        self._layout = Layout(model, config.dtype, config.bucket_bytes)
        self.capacity, self.total_bytes = self._layout.capacity, self._layout.total_bytes
        self._pack: list[Callable[..., jax.Array]] = []  # one program per bucket

    def fill(self, params: Params, version: int) -> Iterator[tuple[dict[str, Any], jax.Array]]:
        """(what an update says of it, [capacity] uint8, there) of every bucket."""
        flat = traverse_util.flatten_dict(params, sep="/")
        if not self._pack:
            mesh = next(iter(flat.values())).sharding.mesh
            self._pack = [packer(slots, self._layout, mesh) for slots in self._layout.buckets]
        for sequence, slots in enumerate(self._layout.buckets):
            chosen = {slot.tensor.path: flat[slot.tensor.path] for slot in slots}
            stamp = jnp.array([version, 0, sequence, 0], jnp.int32)  # two little-endian int64
            described = self._layout.described(slots)
            info = {"version": version, "sequence": sequence, "tensors": described}
            yield info, self._pack[sequence](chosen, stamp).block_until_ready()


def packer(
    slots: Sequence[Slot], layout: Layout, mesh: jax.sharding.Mesh
) -> Callable[..., jax.Array]:
    """A program: (parameters by path, stamp [4] int32) -> [layout.capacity] uint8.

    They are the bytes that `weight_buckets.fill` would write, whole on every device of `mesh`.
    """
    work = functools.partial(_packed, slots=slots, layout=layout)
    return jax.jit(work, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _packed(chosen, stamp, *, slots: Sequence[Slot], layout: Layout):
    parts, at = [_bytes(stamp)], 4 * stamp.size
    for tensor, offset in slots:
        values = turned(
            chosen[tensor.path],
            tensor.layer,
            order=tensor.parameter.hf_order,
            dtype=layout.dtype,
        )
        parts += [jnp.zeros(offset - at, jnp.uint8), _bytes(values)]
        at = offset + parts[-1].size
    return jnp.concatenate([*parts, jnp.zeros(layout.capacity - at, jnp.uint8)])


def _bytes(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(-1)
