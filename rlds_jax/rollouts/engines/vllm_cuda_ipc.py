"""Weights to sidecars that share the trainer's GPUs, without leaving them: CUDA IPC.

Every worker opens the bucket on its own GPU. Not run: no GPU was there to run it on.
"""

from __future__ import annotations

import base64
import ctypes

import jax

from rlds_jax.models.config import ModelConfig
from rlds_jax.models.qwen3 import Params
from rlds_jax.rollouts.engines import cuda_driver
from rlds_jax.rollouts.engines.device_buckets import DeviceBuckets
from rlds_jax.rollouts.engines.vllm_config import VllmConfig
from rlds_jax.rollouts.engines.vllm_transport import Post

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


class CudaIpc:
    """Buckets in device memory, each announced to every worker by the handle of its own GPU's.

    Attributes:
      total_bytes: of one update.
    """

    def __init__(self, config: VllmConfig, model: ModelConfig):
        self._config = config
        self._buckets = DeviceBuckets(config, model)
        self.total_bytes = self._buckets.total_bytes

    def connect(self, post: Post) -> None:
        post([{}] * self._config.replicas).result()

    def send(self, params: Params, version: int, post: Post) -> None:
        for info, bucket in self._buckets.fill(params, version):
            on_gpu = {shard.device.local_hardware_id: shard for shard in bucket.addressable_shards}
            post(
                [
                    info | {"handles": [_handle(on_gpu[gpu].data) for gpu in gpus]}
                    for gpus in map(self._config.replica_gpus, range(self._config.replicas))
                ]
            ).result()

    def close(self) -> None:
        pass


def _handle(bucket: jax.Array) -> tuple[str, int]:
    """What another process opens a device array by: its allocation's handle, and where it begins.

    Raises:
      RuntimeError: the driver refuses; the message says why.
    """
    pointer = ctypes.c_uint64(bucket.unsafe_buffer_pointer())
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    handle = (ctypes.c_byte * HANDLE_BYTES)()
    cuda_driver.enter(cuda_driver.context_of(pointer.value))
    cuda_driver.call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), pointer)
    cuda_driver.call("cuIpcGetMemHandle", ctypes.byref(handle), start)
    return base64.b64encode(bytes(handle)).decode(), pointer.value - start.value
