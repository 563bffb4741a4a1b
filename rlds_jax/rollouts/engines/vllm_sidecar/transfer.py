"""Weight transfer from a JAX trainer, as backends of vLLM 0.32's native weight-transfer API.

A bucket is a buffer that trainer and worker both see: a file under /dev/shm, or the trainer's
device memory opened by CUDA IPC. The trainer fills it, says what lies where, and the worker loads
it by the model's own `load_weights`, in the four phases init, start, update, finish.
"""

from __future__ import annotations

import ctypes
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
      handle: CUDA IPC only: hexadecimal handle and byte offset of the bucket, by GPU UUID.
    """

    version: int
    sequence: int
    tensors: list[tuple[str, int, list[int], str]]
    handle: dict[str, tuple[str, int, int]] | None = None


class BucketTransfer(WeightTransferEngine):
    """Loads buckets; where a bucket lies is the subclasses' business."""

    update_info_cls = BucketUpdate

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketUpdate) -> None:
        """Loads every tensor of one bucket.

        Tensors are copied out of it: vLLM keeps what it is given until a layer is complete, and by
        then the trainer may have filled the bucket anew.

        Raises:
          RuntimeError: the header is of another update or bucket.
        """
        bucket = self.bucket(update_info)
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

    def bucket(self, update_info: BucketUpdate) -> torch.Tensor:
        """The bucket as bytes."""
        raise NotImplementedError

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


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Path of the bucket's file."""

    path: str


class SharedMemoryTransfer(BucketTransfer):
    """The bucket is a file under /dev/shm, mapped at init; the trainer may unlink it then."""

    init_info_cls = SharedMemoryInit

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        descriptor = os.open(init_info.path, os.O_RDWR)  # torch wants writable memory
        try:
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    def bucket(self, update_info: BucketUpdate) -> torch.Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8)


@dataclass
class CudaIpcInit(WeightTransferInitInfo):
    """Nothing is agreed on beforehand: every update brings its handle."""


class CudaIpcTransfer(BucketTransfer):
    """The bucket is memory of the trainer on this very GPU. Not run: no GPU was there."""

    init_info_cls = CudaIpcInit

    def init_transfer_engine(self, init_info: CudaIpcInit) -> None:
        self._open: dict[str, int] = {}

    def bucket(self, update_info: BucketUpdate) -> torch.Tensor:
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        handles = update_info.handle or {}
        if uuid not in handles:
            raise RuntimeError(
                f"no CUDA IPC handle for GPU {uuid}, only for {sorted(handles)}: cuda_ipc needs "
                "engine.placement=shared with trainer and engine on the same GPUs"
            )
        handle, offset, size = handles[uuid]
        base = self._open.get(handle)
        if base is None:
            base = self._open[handle] = _open_ipc_handle(bytes.fromhex(handle), self.device.index)
        return torch.as_tensor(_DeviceBytes(base + offset, size), device=self.device)


class _DeviceBytes:
    """Device memory that torch can wrap."""

    def __init__(self, pointer: int, size: int):
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def _open_ipc_handle(handle: bytes, device: int) -> int:
    """Device pointer of the allocation's base."""
    major = str(torch.version.cuda).split(".")[0]
    runtime = ctypes.CDLL(f"libcudart.so.{major}")
    structure = _IpcHandle.from_buffer_copy(handle)
    pointer = ctypes.c_void_p()
    torch.cuda.set_device(device)
    lazily_enable_peers = 1
    status = runtime.cudaIpcOpenMemHandle(
        ctypes.byref(pointer), structure, ctypes.c_uint(lazily_enable_peers)
    )
    if status:
        raise RuntimeError(f"cudaIpcOpenMemHandle failed with cudaError {status}")
    assert pointer.value is not None
    return pointer.value


def register() -> None:
    """Makes both known to vLLM; needed in every process that makes a worker."""
    WeightTransferEngineFactory.register_engine("rlds_shm", SharedMemoryTransfer)
    WeightTransferEngineFactory.register_engine("rlds_cuda_ipc", CudaIpcTransfer)
