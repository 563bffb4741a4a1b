"""A policy's tensors in Hugging Face names and orientation, packed into buckets of bounded size.

Each process copies its addressable shards straight into their slices of the bucket, turned and cast
on the device: no array is gathered, and besides one bucket no host copy exists. DESIGN "Engines".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from rlds_jax.models.config import ModelConfig
from rlds_jax.models.qwen3 import Parameter, Params, parameter_table

HEADER = 16  # bytes: int64 version, int64 sequence number of the bucket
ALIGNMENT = 64


class Tensor(NamedTuple):
    """One tensor of the checkpoint format.

    Attributes:
      path: of its parameter in the tree; layer: index on the stacked axis, or None.
      split: its shape before heads and head_dim are merged.
    """

    name: str
    path: str
    layer: int | None
    parameter: Parameter
    split: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter.hf_shape


class Slot(NamedTuple):
    """A tensor's place in a bucket; offset in bytes."""

    tensor: Tensor
    offset: int


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor; those of a layer come together, since the engine waits until it has them."""
    by_layer: dict[int, list[Tensor]] = {}
    for path, parameter in parameter_table(config).items():
        own = parameter.shape[1:] if parameter.stacked else parameter.shape
        split = tuple(own[axis] for axis in parameter.hf_order)
        for layer in range(parameter.shape[0]) if parameter.stacked else (None,):
            name = parameter.hf_name.format(layer=layer)
            place = layer if layer is not None else -1 if path == "embed" else config.num_layers
            by_layer.setdefault(place, []).append(Tensor(name, path, layer, parameter, split))
    return [tensor for place in sorted(by_layer) for tensor in by_layer[place]]


class Layout:
    """Which tensor lies where in which bucket.

    Args:
      dtype: of the tensors in the buckets.
      bucket_bytes: wanted size; a larger tensor makes every bucket as large as itself.

    Attributes:
      buckets: the slots of each; capacity: bytes of the largest, header included.
      total_bytes: of all tensors.
    """

    def __init__(self, config: ModelConfig, dtype: Any, bucket_bytes: int):
        self.dtype = jnp.dtype(dtype)
        listed = tensors(config)
        sizes = [int(np.prod(t.shape)) * self.dtype.itemsize for t in listed]
        limit = max(bucket_bytes, HEADER + ALIGNMENT + max(sizes))
        self.total_bytes = sum(sizes)
        self.buckets: list[list[Slot]] = [[]]
        self.capacity = offset = ALIGNMENT  # the header, padded
        for tensor, size in zip(listed, sizes, strict=True):
            if offset + size > limit:
                self.buckets.append([])
                offset = ALIGNMENT
            self.buckets[-1].append(Slot(tensor, offset))
            offset += -(-size // ALIGNMENT) * ALIGNMENT
            self.capacity = max(self.capacity, offset)

    def described(self, slots: Sequence[Slot]) -> list[tuple[str, int, list[int], str]]:
        """Name, offset, shape and dtype of each tensor of a bucket."""
        return [(s.tensor.name, s.offset, list(s.tensor.shape), self.dtype.name) for s in slots]


def fill(buffer: np.ndarray, params: Params, layout: Layout, version: int) -> Iterator[int]:
    """Writes one bucket after the other into `buffer`, yielding each one's number.

    The bucket is the caller's until the next one is asked for. Only shards of this process are
    written, each value once.

    Args:
      buffer: [>= layout.capacity] uint8.
      params: the tree, sharded in any way that leaves the layer axis whole.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    for sequence, slots in enumerate(layout.buckets):
        buffer[:HEADER].view(np.int64)[:] = version, sequence
        for tensor, offset in slots:
            size = int(np.prod(tensor.shape)) * layout.dtype.itemsize
            view = buffer[offset : offset + size].view(layout.dtype).reshape(tensor.split)
            for index, piece in pieces(flat[tensor.path], tensor, layout.dtype):
                view[index] = np.asarray(piece)
        yield sequence


def pieces(array: jax.Array, tensor: Tensor, dtype: Any) -> Iterator[tuple[Any, jax.Array]]:
    """(index into the split tensor, values there) of every shard of this process."""
    order = tensor.parameter.hf_order
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            index = shard.index[1:] if tensor.parameter.stacked else shard.index
            yield (
                tuple(index[axis] for axis in order),
                turned(shard.data, tensor.layer, order=order, dtype=dtype),
            )


@functools.partial(jax.jit, static_argnames=("order", "dtype"))
def turned(values, layer, *, order: tuple[int, ...], dtype):
    """One layer's values (all of them where layer is None) in the checkpoint's order of axes."""
    if layer is not None:
        values = jax.lax.dynamic_index_in_dim(values, layer, keepdims=False)
    return values.transpose(order).astype(dtype)
