"""Weight transfer from a JAX trainer, as a backend of vLLM 0.32's native weight-transfer API.

A bucket is a file under /dev/shm that trainer and worker both map. The trainer fills it, says what
lies where, and the worker loads it by the model's own `load_weights`, in the four phases init,
start, update, finish.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

HEADER = 16  # bytes: int64 version, int64 sequence number of the bucket


@dataclass
class BucketUpdate(WeightTransferUpdateInfo):
    """What one bucket holds.

    Attributes:
      version: of the weights; sequence: number of the bucket within the update. Both must stand in
        the bucket's header.
      tensors: (Hugging Face name, offset in bytes, shape, dtype name) of each tensor.
    """

    version: int
    sequence: int
    tensors: list[tuple[str, int, list[int], str]]


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Path of the bucket's file."""

    path: str


class SharedMemoryTransfer(WeightTransferEngine):
    """Maps the bucket's file at init, and loads what the trainer puts there."""

    init_info_cls = SharedMemoryInit
    update_info_cls = BucketUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        descriptor = os.open(init_info.path, os.O_RDWR)  # torch wants writable memory
        try:
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketUpdate) -> None:
        """Loads every tensor of one bucket.

        Tensors are copied out of it: vLLM keeps what it is given until a layer is complete, and by
        then the trainer may have filled the bucket anew.

        Raises:
          RuntimeError: the header is of another update or bucket.
        """
        bucket = torch.frombuffer(self._map, dtype=torch.uint8)
        stamp = bucket[:HEADER].view(torch.int64).tolist()
        if stamp != [update_info.version, update_info.sequence]:
            raise RuntimeError(
                f"the bucket is stamped (version, sequence) {stamp}, the update says "
                f"{[update_info.version, update_info.sequence]}"
            )
        weights = []
        for name, offset, shape, dtype_name in update_info.tensors:
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            piece = bucket[offset : offset + size].view(dtype).view(shape)
            weights.append((name, piece.to(self.device, copy=True)))
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)

    def shutdown(self) -> None:
        pass


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Renews what a tied head has derived from the embedding.

    No tensor of an update is named after such a head, so vLLM does not process it again; on a CPU
    it would go on with the packed copy of the old embedding.
    """
    for head in model.modules():
        if isinstance(head, ParallelLMHead):
            head.quant_method.process_weights_after_loading(head)


def register() -> None:
    """Makes it known to vLLM; needed in every process that makes a worker."""
    WeightTransferEngineFactory.register_engine("rlds_shm", SharedMemoryTransfer)
