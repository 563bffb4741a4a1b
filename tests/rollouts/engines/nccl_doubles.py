"""NCCL and the CUDA driver without a GPU: a group is a folder, what it sends are files in it.

The library's entry points are C function pointers with the argument types of nccl.h, so a call that
passes something else arrives as garbage. A unique id begins with its folder's name.
"""

import asyncio
import base64
import ctypes
import os
import types
from pathlib import Path

VERSION = 22907
IN_PROGRESS, INVALID_USAGE, REMOTE_ERROR = 7, 5, 6
NOT_READY = 600
NAME = 8  # bytes of a unique id that name its folder


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """ncclConfig_v21400."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


VOID_P, INT = ctypes.c_void_p, ctypes.c_int
SIGNATURES = {
    "ncclGetVersion": (INT, ctypes.POINTER(INT)),
    "ncclGetUniqueId": (INT, ctypes.POINTER(UniqueId)),
    "ncclCommInitRankConfig": (
        INT,
        ctypes.POINTER(VOID_P),
        INT,
        UniqueId,
        INT,
        ctypes.POINTER(Config),
    ),
    "ncclCommGetAsyncError": (INT, VOID_P, ctypes.POINTER(INT)),
    "ncclAllReduce": (INT, VOID_P, VOID_P, ctypes.c_size_t, INT, INT, VOID_P, VOID_P),
    "ncclBroadcast": (INT, VOID_P, VOID_P, ctypes.c_size_t, INT, INT, VOID_P, VOID_P),
    "ncclCommAbort": (INT, VOID_P),
    "ncclGetErrorString": (VOID_P, INT),
    "ncclGetLastError": (VOID_P, VOID_P),
}


class FakeNccl:
    """Rank 0's library, and the driver that its stream is of.

    Attributes:
      library, driver: to be loaded instead of the real ones.
      groups: how many ranks each group had, in order; aborted: how many were left.
      refusals, remote_errors: how often it is to refuse a group, or to lose one at a broadcast.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.groups: list[int] = []
        self.aborted = self.refusals = self.remote_errors = 0
        self._sent = 0
        self._lost = False
        said = (b"invalid usage", b"two ranks on one GPU")
        self._texts = [ctypes.create_string_buffer(text) for text in said]
        entries = {
            name: ctypes.CFUNCTYPE(*types_)(getattr(self, f"_{name}"))
            for name, types_ in SIGNATURES.items()
        }
        self.library = types.SimpleNamespace(**entries)
        self.driver = types.SimpleNamespace(
            cuPointerGetAttribute=lambda context, attribute, pointer: 0,
            cuCtxSetCurrent=lambda context: 0,
            cuStreamCreate=lambda stream, flags: 0,
            cuStreamQuery=lambda stream: NOT_READY if self._sending() else 0,
            cuStreamDestroy_v2=lambda stream: 0,
        )

    def _sending(self):
        return self._sent and not self._all("got", self._sent)

    def _all(self, what, number=0):
        """Whether every other rank has come so far."""
        ranks = range(1, self.groups[-1])
        return all((self._group / f"{what}_{number}_{rank}").exists() for rank in ranks)

    def _ncclGetVersion(self, version):
        version[0] = VERSION
        return 0

    def _ncclGetUniqueId(self, unique_id):
        name = os.urandom(NAME // 2).hex().encode()
        ctypes.memmove(unique_id, name + os.urandom(120), 128)
        return 0

    def _ncclCommInitRankConfig(self, handle, ranks, unique_id, rank, config):
        config = config.contents
        assert (config.size, config.magic) == (24, 0xCAFEBEEF)
        assert (config.version, config.blocking, rank) == (21400, 0, 0)
        if self.refusals:
            self.refusals -= 1
            return INVALID_USAGE
        self._group = self._folder / bytes(unique_id)[:NAME].decode()
        self._group.mkdir(exist_ok=True)
        self._sent, self._lost = 0, False
        self.groups.append(ranks)
        handle[0] = len(self.groups)
        return IN_PROGRESS

    def _ncclCommGetAsyncError(self, handle, state):
        assert handle == len(self.groups)
        joined = self._all("joined")
        state[0] = REMOTE_ERROR if self._lost else 0 if joined else IN_PROGRESS
        return 0

    def _ncclAllReduce(self, send, receive, count, dtype, operation, handle, stream):
        assert (count, dtype, operation) == (1, 7, 0)
        assert self._all("joined")
        (self._group / "added_up").touch()
        return IN_PROGRESS

    def _ncclBroadcast(self, send, receive, count, dtype, root, handle, stream):
        assert (dtype, root, send) == (1, 0, receive)
        self._sent += 1
        whole = self._group / f"bucket_{self._sent}"
        whole.with_suffix(".part").write_bytes(ctypes.string_at(send, count))
        whole.with_suffix(".part").rename(whole)
        if self.remote_errors:
            self.remote_errors -= 1
            self._lost = True
        return IN_PROGRESS

    def _ncclCommAbort(self, handle):
        self.aborted += 1
        return IN_PROGRESS

    def _ncclGetErrorString(self, result):
        return ctypes.addressof(self._texts[0])

    def _ncclGetLastError(self, handle):
        return ctypes.addressof(self._texts[1])


class Peers:
    """A scripted sidecar's ranks of a group."""

    def __init__(self, folder: Path, init_info, ranks: int):
        assert init_info["nccl_version"] == VERSION
        unique_id = base64.b64decode(init_info["nccl_unique_id_b64"])
        assert len(unique_id) == 128
        first = init_info["rank_offset"]
        self._ranks = range(first, first + ranks)
        assert self._ranks.stop <= init_info["world_size"]
        self._group = folder / unique_id[:NAME].decode()
        self._size = init_info["packed_buffer_size_bytes"]
        self._received = 0

    async def join(self):
        await self._exists(self._group)
        self._say("joined", 0)
        await self._exists(self._group / "added_up")

    async def receive(self) -> bytes:
        self._received += 1
        path = self._group / f"bucket_{self._received}"
        await self._exists(path)
        bucket = path.read_bytes()
        assert len(bucket) == self._size
        self._say("got", self._received)
        return bucket

    def _say(self, what, number):
        for rank in self._ranks:
            (self._group / f"{what}_{number}_{rank}").touch()

    async def _exists(self, path):
        while not path.exists():
            await asyncio.sleep(0.005)
