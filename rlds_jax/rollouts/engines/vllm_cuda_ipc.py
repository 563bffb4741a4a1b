"""Weights to sidecars that share the trainer's GPUs, without leaving them: CUDA IPC.

On each GPU of the mesh a bucket holds the same whole tensors that it would hold in shared memory;
every worker opens the one on its own GPU. Not run: no GPU was there to run it on.
"""

from __future__ import annotations

import base64
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from rlds_jax.models.config import ModelConfig
from rlds_jax.models.qwen3 import Params
from rlds_jax.rollouts.engines.vllm_config import VllmConfig
from rlds_jax.rollouts.engines.vllm_transport import Post
from rlds_jax.rollouts.engines.weight_buckets import Layout, Slot, turned

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
POINTER_CONTEXT = 1  # CU_POINTER_ATTRIBUTE_CONTEXT


class CudaIpc:
    """Buckets in device memory, each announced to every worker by the handle of its own GPU's.

    Attributes:
      total_bytes: of one update.
    """

    def __init__(self, config: VllmConfig, model: ModelConfig):
        self._config = config
        self._layout = Layout(model, config.dtype, config.bucket_bytes)
        self.total_bytes = self._layout.total_bytes
        self._pack: list[Callable[..., jax.Array]] = []  # one program per bucket

    def connect(self, post: Post) -> None:
        post([{}] * self._config.replicas)

    def send(self, params: Params, version: int, post: Post) -> None:
        flat = traverse_util.flatten_dict(params, sep="/")
        if not self._pack:
            mesh = next(iter(flat.values())).sharding.mesh
            self._pack = [packer(slots, self._layout, mesh) for slots in self._layout.buckets]
        for sequence, slots in enumerate(self._layout.buckets):
            chosen = {slot.tensor.path: flat[slot.tensor.path] for slot in slots}
            stamp = jnp.array([version, 0, sequence, 0], jnp.int32)  # two little-endian int64
            bucket = self._pack[sequence](chosen, stamp).block_until_ready()
            on_gpu = {shard.device.local_hardware_id: shard for shard in bucket.addressable_shards}
            described = self._layout.described(slots)
            info = {"version": version, "sequence": sequence, "tensors": described}
            post(
                [
                    info | {"handles": [_handle(on_gpu[gpu].data) for gpu in gpus]}
                    for gpus in map(self._config.replica_gpus, range(self._config.replicas))
                ]
            )

    def close(self) -> None:
        pass


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


def _handle(bucket: jax.Array) -> tuple[str, int]:
    """What another process opens a device array by: its allocation's handle, and where it begins.

    Raises:
      RuntimeError: the driver refuses; the message says why.
    """
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if status := getattr(cuda, name)(*arguments):
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")

    pointer = ctypes.c_uint64(bucket.unsafe_buffer_pointer())
    context, start, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
    handle = (ctypes.c_byte * HANDLE_BYTES)()
    call("cuPointerGetAttribute", ctypes.byref(context), POINTER_CONTEXT, pointer)
    call("cuCtxSetCurrent", context)  # of this thread
    call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), pointer)
    call("cuIpcGetMemHandle", ctypes.byref(handle), start)
    return base64.b64encode(bytes(handle)).decode(), pointer.value - start.value
