"""NCCL's C library from Python without torch: rank 0 of a group, in calls that never block.

A collective waits for every rank, and a rank may die. So the communicator is a non-blocking one: it
is asked whether it is done, and can be aborted at any time. The sizes and values are nccl.h's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlds_jax.rollouts.engines import cuda_driver
from rlds_jax.rollouts.engines.vllm_process import SidecarFailed

LIBRARY = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
UINT8, FLOAT32 = 1, 7  # ncclDataType_t
SUM = 0  # ncclRedOp_t
ABORT_S = 10.0  # for the library to let go of a group; then it is left to itself


class NcclFailed(SidecarFailed):
    """NCCL reports an error, its own or that another rank is gone."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t as NCCL 2.14 had it; a later library takes its defaults for what came since."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )

    @classmethod
    def non_blocking(cls) -> Config:
        return cls(size=ctypes.sizeof(cls), magic=0xCAFEBEEF, version=21400, blocking=0)


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_PROTOTYPES: Mapping[str, Sequence[type[Any]]] = {  # all return ncclResult_t
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRankConfig": (
        ctypes.POINTER(_POINTER),
        _INT,
        UniqueId,
        _INT,
        ctypes.POINTER(Config),
    ),
    "ncclCommGetAsyncError": (_POINTER, ctypes.POINTER(_INT)),
    "ncclAllReduce": (_POINTER, _POINTER, ctypes.c_size_t, _INT, _INT, _POINTER, _POINTER),
    "ncclBroadcast": (_POINTER, _POINTER, ctypes.c_size_t, _INT, _INT, _POINTER, _POINTER),
    "ncclCommAbort": (_POINTER,),
}
_TEXTS: Mapping[str, type[Any]] = {"ncclGetErrorString": _INT, "ncclGetLastError": _POINTER}


class Nccl:
    """The library.

    Attributes:
      version: as ncclGetVersion gives it: 22907 for 2.29.7.
    """

    def __init__(self, library: Any):
        for name, arguments in _PROTOTYPES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _INT
        for name, argument in _TEXTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = [argument], ctypes.c_char_p
        self._library = library
        version = _INT()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value

    def call(self, name: str, *arguments: Any) -> None:
        """One call; it may be under way still.

        Raises:
          NcclFailed: the library refuses.
        """
        self.check(name, getattr(self._library, name)(*arguments))

    def check(self, name: str, result: int) -> None:
        """Raises NcclFailed, with the library's words, for a result that is an error."""
        if result not in (SUCCESS, IN_PROGRESS):
            texts = self._library.ncclGetErrorString(result), self._library.ncclGetLastError(None)
            said = ": ".join(text.decode(errors="replace") for text in texts if text)
            raise NcclFailed(f"{name}: {said} ({result})")

    def unique_id(self) -> UniqueId:
        """The name of a new group, good for one."""
        unique_id = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return unique_id


def load() -> Nccl:
    """The library that JAX uses: of the package beside it, else of the system.

    Raises:
      OSError: there is none.
    """
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        package = None
    folders = (package and package.submodule_search_locations) or []
    found = [str(path) for folder in folders if (path := Path(folder, "lib", LIBRARY)).exists()]
    return Nccl(ctypes.CDLL((*found, LIBRARY)[0]))


class Communicator:
    """Rank 0 of a group, on the GPU of a CUDA context.

    No method waits for another rank; `done` says when what was begun has ended. Every method but
    `abort` raises NcclFailed where the group is broken; it is good for `abort` alone then.
    """

    def __init__(self, nccl: Nccl, unique_id: UniqueId, ranks: int, context: ctypes.c_void_p):
        self._nccl, self._handle, self._context = nccl, _POINTER(), context
        cuda_driver.enter(context)
        self._stream = cuda_driver.Stream()
        nccl.call(
            "ncclCommInitRankConfig",
            ctypes.byref(self._handle),
            ranks,
            unique_id,
            0,
            ctypes.byref(Config.non_blocking()),
        )

    def done(self) -> bool:
        """Whether the group is complete and everything asked of it has happened."""
        state = _INT()
        self._nccl.call("ncclCommGetAsyncError", self._handle, ctypes.byref(state))
        self._nccl.check("NCCL's group", state.value)
        return state.value == SUCCESS and self._stream.idle()

    def add_up(self, pointer: int) -> None:
        """Begins to sum one float32 of every rank, in place."""
        self._begin("ncclAllReduce", pointer, pointer, 1, FLOAT32, SUM)

    def broadcast(self, pointer: int, size: int) -> None:
        """Begins to send bytes to every other rank; they must stay until it is done."""
        self._begin("ncclBroadcast", pointer, pointer, size, UINT8, 0)

    def _begin(self, name: str, *arguments: int) -> None:
        cuda_driver.enter(self._context)
        self._nccl.call(name, *arguments, self._handle, self._stream.handle)

    def abort(self) -> None:
        """Leaves the group, whatever it is doing."""

        def leave() -> None:
            cuda_driver.enter(self._context)
            self._nccl.call("ncclCommAbort", self._handle)
            self._stream.close()

        thread = threading.Thread(target=leave, daemon=True)
        thread.start()
        thread.join(ABORT_S)
