"""The few calls of the CUDA driver that move weights; JAX makes none of them for its callers."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

POINTER_CONTEXT = 1  # CU_POINTER_ATTRIBUTE_CONTEXT
STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: waits for no other stream
NOT_READY = 600  # CUDA_ERROR_NOT_READY


@functools.cache
def load() -> Any:
    """The driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """One call.

    Raises:
      RuntimeError: the driver refuses; the message says why.
    """
    if status := getattr(load(), name)(*arguments):
        text = ctypes.c_char_p()
        load().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


def context_of(pointer: int) -> ctypes.c_void_p:
    """The context that device memory belongs to."""
    context = ctypes.c_void_p()
    call("cuPointerGetAttribute", ctypes.byref(context), POINTER_CONTEXT, ctypes.c_uint64(pointer))
    return context


def enter(context: ctypes.c_void_p) -> None:
    """Makes a context this thread's."""
    call("cuCtxSetCurrent", context)


class Stream:
    """A stream of the current context.

    Attributes:
      handle: of the driver.
    """

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(self.handle), STREAM_NON_BLOCKING)

    def idle(self) -> bool:
        """Whether all its work is done."""
        if load().cuStreamQuery(self.handle) == NOT_READY:
            return False
        call("cuStreamQuery", self.handle)
        return True

    def close(self) -> None:
        """Frees it once its work is done; does not wait."""
        call("cuStreamDestroy_v2", self.handle)
