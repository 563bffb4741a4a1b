"""Weights to sidecars on GPUs of their own, from the trainer's first: one NCCL broadcast a bucket.

The trainer is rank 0 of a group with every worker. A group that loses a rank is given up, at the
deadline at the latest, with an error that has sidecars restarted; then they make a new group. Not
run: no GPU was there to run it on.
"""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future

import jax
import jax.numpy as jnp

from rlds_jax.models.config import ModelConfig
from rlds_jax.models.qwen3 import Params
from rlds_jax.rollouts.engines import cuda_driver, nccl
from rlds_jax.rollouts.engines.device_buckets import DeviceBuckets
from rlds_jax.rollouts.engines.vllm_config import VllmConfig
from rlds_jax.rollouts.engines.vllm_transport import Post

_POLL_S = 0.0005


class NcclBroadcast:
    """Buckets in device memory, sent from the first GPU of this process.

    Attributes:
      total_bytes: of one update.

    Raises:
      ValueError: the library is missing.
    """

    def __init__(self, config: VllmConfig, model: ModelConfig):
        try:
            self._nccl = nccl.load()
        except OSError as error:
            raise ValueError(
                f"engine.weight_transport=nccl needs {nccl.LIBRARY} ({error}): install "
                "nvidia-nccl-cu12 (the extra cuda12 does), or use "
                "engine.weight_transport=shared_memory"
            ) from error
        self._config = config
        self._buckets = DeviceBuckets(config, model)
        self.total_bytes = self._buckets.total_bytes
        self._device = jax.local_devices()[0]
        self._group: nccl.Communicator | None = None

    def connect(self, post: Post) -> None:
        self.close()
        unique_id = self._nccl.unique_id()
        per_replica = self._config.tensor_parallel
        ranks = 1 + self._config.replicas * per_replica
        group = {
            "world_size": ranks,
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "nccl_version": self._nccl.version,
            "packed_buffer_size_bytes": self._buckets.capacity,
        }
        offsets = range(1, ranks, per_replica)
        one = jnp.zeros(1, jnp.float32, device=self._device).block_until_ready()
        pointer = one.unsafe_buffer_pointer()
        answers = post([group | {"rank_offset": offset} for offset in offsets])
        with self._or_give_up(answers):
            context = cuda_driver.context_of(pointer)
            self._group = nccl.Communicator(self._nccl, unique_id, ranks, context)
            self._wait_for(self._group, answers)
            self._group.add_up(pointer)  # every member of vLLM's does on joining
            self._wait_for(self._group, answers)
            answers.result()

    def send(self, params: Params, version: int, post: Post) -> None:
        assert self._group is not None
        for info, bucket in self._buckets.fill(params, version):
            on_gpu = {shard.device: shard.data for shard in bucket.addressable_shards}
            pointer = on_gpu[self._device].unsafe_buffer_pointer()
            answers = post([info] * self._config.replicas)
            with self._or_give_up(answers):
                self._group.broadcast(pointer, self._buckets.capacity)
                self._wait_for(self._group, answers)
                answers.result()

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _wait_for(self, group: nccl.Communicator, answers: Future[None]) -> None:
        """Returns once the group is done; a replica that fails meanwhile ends it early."""
        deadline = time.monotonic() + self._config.update_timeout_s
        while not group.done():
            if answers.done():
                answers.result()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"NCCL is not done within engine.update_timeout_s "
                    f"({self._config.update_timeout_s:g} s)"
                )
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _or_give_up(self, answers: Future[None]) -> Iterator[None]:
        """Leaves the group, and waits for no more answers, when anything goes wrong."""
        try:
            yield
        except BaseException:
            answers.cancel()
            self.close()
            raise
