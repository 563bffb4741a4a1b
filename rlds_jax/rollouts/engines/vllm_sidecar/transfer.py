"""Weight transfer from a JAX trainer, as a backend of vLLM 0.32's native weight-transfer API.

A bucket is memory that trainer and worker both see, a file under /dev/shm or, by CUDA IPC, memory
of the worker's GPU, or else the worker's own, which NCCL fills. The trainer says what lies where,
and the worker loads it by the model's own `load_weights`, in the four phases init, start, update,
finish.
"""

from __future__ import annotations

import base64
import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    worker_init_process_group,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

HEADER = 16  # bytes: int64 version, int64 sequence number of the bucket
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


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


@dataclass
class CudaIpcInit(WeightTransferInitInfo):
    """Nothing is agreed upon beforehand."""


@dataclass
class CudaIpcUpdate(BucketUpdate):
    """A bucket in device memory.

    Attributes:
      handles: for each worker of this engine, the base64 of the driver's handle of an allocation,
        and the bucket's offset in it.
    """

    handles: list[tuple[str, int]]


@dataclass(kw_only=True)
class NcclInit(NCCLWeightTransferInitInfo):
    """The group to join; packed_buffer_size_bytes is the size of every bucket.

    Attributes:
      nccl_version: of the trainer's library.
    """

    nccl_version: int


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


class DeviceMemory:
    """Bytes of a GPU in the form in which torch takes them without a copy."""

    def __init__(self, pointer: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class BucketTransfer(WeightTransferEngine):
    """Loads bucket after bucket; where a bucket is, its kind knows."""

    update_info_cls = BucketUpdate

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def load(self, bucket: torch.Tensor, update_info: BucketUpdate) -> None:
        """Loads every tensor of one bucket, [bytes] uint8.

        Tensors are copied out of it: vLLM keeps what it is given until a layer is complete, and by
        then the trainer may have filled the bucket anew.

        Raises:
          RuntimeError: the header is of another update or bucket.
        """
        stamp = bucket[:HEADER].view(torch.int64).tolist()
        if stamp != [update_info.version, update_info.sequence]:
            raise RuntimeError(
                f"the bucket is stamped (version, sequence) {stamp}, the update says "
                f"{[update_info.version, update_info.sequence]}"
            )
        weights = []
        for name, offset, shape, dtype_name in update_info.tensors:
            dtype = getattr(torch, dtype_name)
            piece = bucket[offset : offset + _bytes(shape, dtype_name)].view(dtype).view(shape)
            weights.append((name, piece.to(self.device, copy=True)))
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)

    def shutdown(self) -> None:
        pass


class SharedMemoryTransfer(BucketTransfer):
    """Maps the bucket's file at init."""

    init_info_cls = SharedMemoryInit

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        descriptor = os.open(init_info.path, os.O_RDWR)  # torch wants writable memory
        try:
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    def receive_weights(self, update_info: BucketUpdate) -> None:
        self.load(torch.frombuffer(self._map, dtype=torch.uint8), update_info)


class CudaIpcTransfer(BucketTransfer):
    """Opens the bucket that the trainer holds on this worker's GPU; each update has another."""

    init_info_cls = CudaIpcInit
    update_info_cls = CudaIpcUpdate

    def init_transfer_engine(self, init_info: CudaIpcInit) -> None:
        pass

    def receive_weights(self, update_info: CudaIpcUpdate) -> None:
        text, offset = update_info.handles[self.parallel_config.rank]
        handle = IpcHandle.from_buffer_copy(base64.b64decode(text))
        cuda, start = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # makes the context that the handle is opened in
            if status := cuda.cuIpcOpenMemHandle_v2(ctypes.byref(start), handle, LAZY_PEER_ACCESS):
                raise RuntimeError(f"cuIpcOpenMemHandle failed with {status}")
            try:
                last = max(o + _bytes(shape, dtype) for _, o, shape, dtype in update_info.tensors)
                memory = DeviceMemory(start.value + offset, last)
                self.load(torch.as_tensor(memory, device=self.device), update_info)
                torch.cuda.synchronize()
            finally:
                cuda.cuIpcCloseMemHandle(start)


class NcclTransfer(BucketTransfer):
    """Receives each bucket by a broadcast of the trainer's, who is rank 0 of a group of all."""

    init_info_cls = NcclInit
    _group: Any = None

    def init_transfer_engine(self, init_info: NcclInit) -> None:
        """Joins the group, and leaves the one before it, of which some rank was restarted.

        Raises:
          RuntimeError: the versions differ, of which NCCL would speak in the log alone.
        """
        self.shutdown()
        version = NCCLLibrary().ncclGetRawVersion()
        if version != init_info.nccl_version:
            raise RuntimeError(
                f"rlds_jax sidecar: found NCCL {version}, the trainer has {init_info.nccl_version}"
            )
        self._group = worker_init_process_group(init_info, self.parallel_config)
        size = init_info.packed_buffer_size_bytes
        self._bucket = torch.empty(size, dtype=torch.uint8, device=self.device)

    def receive_weights(self, update_info: BucketUpdate) -> None:
        self._group.broadcast(self._bucket, src=0)
        self.load(self._bucket, update_info)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._group = None


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Renews what a tied head has derived from the embedding.

    No tensor of an update is named after such a head, so vLLM does not process it again; on a CPU
    it would go on with the packed copy of the old embedding.
    """
    for head in model.modules():
        if isinstance(head, ParallelLMHead):
            head.quant_method.process_weights_after_loading(head)


def _bytes(shape: list[int], dtype_name: str) -> int:
    return torch.Size(shape).numel() * getattr(torch, dtype_name).itemsize


def register() -> None:
    """Makes it known to vLLM; needed in every process that makes a worker."""
    register_engine = WeightTransferEngineFactory.register_engine
    register_engine("rlds_shared_memory", SharedMemoryTransfer)
    register_engine("rlds_cuda_ipc", CudaIpcTransfer)
    register_engine("rlds_nccl", NcclTransfer)
