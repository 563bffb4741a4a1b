"""How weights reach a sidecar; the worker's side is vllm_sidecar/transfer.py."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlds_jax.models.config import ModelConfig
from rlds_jax.models.qwen3 import Params
from rlds_jax.rollouts.engines.vllm_config import VllmConfig
from rlds_jax.rollouts.engines.weight_buckets import Layout, fill

SHARED_MEMORY = Path("/dev/shm")

Post = Callable[[Sequence[dict[str, Any]]], Future[None]]  # one message per replica


class OutOfSharedMemory(OSError):
    """/dev/shm has no room for a bucket."""


class Transport(Protocol):
    """Carries a policy's weights to every replica. Its methods block: call them off the loop.

    A `Post` sends each replica its message; its future is done when all have answered, or holds
    what one of them raised.

    Attributes:
      total_bytes: of one update.
    """

    total_bytes: int

    def connect(self, post: Post) -> None:
        """Tells every replica's backend what it needs; again after any of them was restarted."""
        ...

    def send(self, params: Params, version: int, post: Post) -> None:
        """Posts the info of every update; each call returns once the replicas have loaded it."""
        ...

    def close(self) -> None: ...


class SharedMemory:
    """One file under /dev/shm that has no name: it is gone with the last who has it open.

    Raises:
      OutOfSharedMemory: it does not fit.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: str,
        bucket_bytes: int,
        replicas: int,
        folder: Path = SHARED_MEMORY,
    ):
        self._layout = Layout(model, dtype, bucket_bytes)
        self._replicas = replicas
        self.total_bytes = self._layout.total_bytes
        self._descriptor, path = tempfile.mkstemp(prefix="rlds_jax_", dir=folder)
        os.unlink(path)
        size = self._layout.capacity
        try:
            os.posix_fallocate(self._descriptor, 0, size)  # or a later write would be a SIGBUS
        except OSError as error:
            os.close(self._descriptor)
            if error.errno != errno.ENOSPC:
                raise
            raise OutOfSharedMemory(
                f"{folder} has {shutil.disk_usage(folder).free:,} bytes left, a bucket of weights "
                f"takes {size:,}: enlarge it (docker: --shm-size) or lower engine.bucket_bytes; "
                "a bucket holds at least the largest tensor"
            ) from error
        self._buffer = np.frombuffer(mmap.mmap(self._descriptor, size), np.uint8)

    def connect(self, post: Post) -> None:
        post([{"path": f"/proc/{os.getpid()}/fd/{self._descriptor}"}] * self._replicas).result()

    def send(self, params: Params, version: int, post: Post) -> None:
        for sequence in fill(self._buffer, params, self._layout, version):
            described = self._layout.described(self._layout.buckets[sequence])
            info = {"version": version, "sequence": sequence, "tensors": described}
            post([info] * self._replicas).result()

    def close(self) -> None:
        os.close(self._descriptor)


def make_transport(config: VllmConfig, model: ModelConfig) -> Transport:
    """The transport of an engine's weights.

    Raises:
      OutOfSharedMemory, ValueError: what it needs is not here.
    """
    if config.weight_transport == "cuda_ipc":
        from rlds_jax.rollouts.engines.vllm_cuda_ipc import CudaIpc

        return CudaIpc(config, model)
    if config.weight_transport == "nccl":
        from rlds_jax.rollouts.engines.vllm_nccl import NcclBroadcast

        return NcclBroadcast(config, model)
    return SharedMemory(model, config.dtype, config.bucket_bytes, config.replicas)
