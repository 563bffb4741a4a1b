"""Accelerators that need not be here: what they can do, and devices to compile for."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, by its maker's data sheet.

    Attributes:
      kinds: parts of jax's `device_kind` by which a live one is recognised.
      memory: bytes.
      flops: dense bf16 peak, FLOP/s.
      bandwidth: of its memory, bytes/s.
      link: to the devices of its host or slice, bytes/s, one direction, all links together.
      network: its share of the network between hosts or slices, bytes/s, one direction.
      per_host: devices of one host.
      capability: CUDA compute capability; None for a TPU.
      cores: streaming multiprocessors of a GPU; 0 for a TPU.
      l2: bytes of a GPU's second-level cache.
    """

    kinds: tuple[str, ...]
    memory: int
    flops: float
    bandwidth: float
    link: float
    network: float
    per_host: int
    capability: tuple[int, int] | None = None
    cores: int = 0
    l2: int = 0

    @property
    def platform(self) -> str:
        return "gpu" if self.capability else "tpu"


GIB = 2**30
CHIPS = {
    "h100": Chip(("H100",), 84942979072, 989e12, 3.35e12, 450e9, 50e9, 8, (9, 0), 132, 50 * 2**20),
    "h200": Chip(("H200",), 150754820096, 989e12, 4.8e12, 450e9, 50e9, 8, (9, 0), 132, 50 * 2**20),
    "a100-80gb": Chip(
        ("A100",), 84987740160, 312e12, 2.039e12, 300e9, 25e9, 8, (8, 0), 108, 40 * 2**20
    ),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), 16 * GIB, 197e12, 819e9, 100e9, 6.25e9, 4),
    "v5p": Chip(("TPU v5p", "TPU v5"), 95 * GIB, 459e12, 2.765e12, 300e9, 12.5e9, 4),
    "v6e": Chip(("TPU v6 lite", "TPU v6e"), 32 * GIB, 918e12, 1.64e12, 200e9, 12.5e9, 4),
}


def chip(device_kind: str) -> Chip | None:
    """The chip that jax calls so; None for others."""
    return next((c for c in CHIPS.values() if any(kind in device_kind for kind in c.kinds)), None)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind that run one program; `shape` is that of a TPU slice."""

    name: str
    chip: Chip
    devices: int
    shape: str | None = None

    @property
    def hosts(self) -> int:
        return max(self.devices // self.chip.per_host, 1)


def parse(text: str) -> Topology:
    """Reads "h100:8", "h100:16" (two hosts) or "v5e:4x4" ("tpu v5e:4x4" too).

    Raises:
      ValueError: the chip is unknown, or its number or slice does not read.
    """
    name, _, size = text.removeprefix("tpu ").strip().partition(":")
    chip = CHIPS.get(name.lower())
    if chip is None:
        raise ValueError(f"topology {text!r}: the chip {name!r} is unknown; use one of {[*CHIPS]}")
    pattern, example = (r"\d+", "8") if chip.platform == "gpu" else (r"\d+(x\d+){1,2}", "4x4")
    if not re.fullmatch(pattern, size):
        raise ValueError(f"topology {text!r}: expected a size such as {name}:{example}")
    count = math.prod(map(int, size.split("x")))
    if count < 1 or (count > chip.per_host and count % chip.per_host):
        raise ValueError(
            f"topology {text!r}: {count} devices are neither part of one host nor whole hosts of "
            f"{chip.per_host}"
        )
    shape = size if chip.platform == "tpu" else None
    return Topology(f"{name.lower()}:{size}", chip, count, shape)


def devices(topology: Topology) -> Sequence[Any]:
    """Devices to compile for; they run nothing.

    Raises:
      RuntimeError: the compiler's plugin is not installed, or does not know the topology.
    """
    _require("libtpu" if topology.shape else "jax_cuda12_plugin", topology)
    try:
        if topology.shape:
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
            os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
            found = topologies.get_topology_desc(topology.name, platform="tpu")
        else:
            per_host = min(topology.devices, topology.chip.per_host)
            found = topologies.get_topology_desc(
                topology.name,
                platform="cuda",
                target_config=_target_config(topology.chip),
                topology=f"1x{topology.hosts}x{per_host}",
            )
    except Exception as error:  # whatever a plugin raises
        raise RuntimeError(
            f"topology {topology.name!r} cannot be compiled for here: {error}"
        ) from error
    return found.devices


@contextlib.contextmanager
def absent(chip: Chip) -> Iterator[None]:
    """Lets jax lower cuDNN attention for a GPU that is not here: its checks ask the live device."""
    if chip.capability is None:
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    def own(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    answers = {
        "check_compute_capability": lambda wanted: chip.capability >= own(wanted),
        "is_cuda_compute_capability_equal": lambda wanted: chip.capability == own(wanted),
        "check_cudnn_version": lambda: 91000,
    }
    kept = {name: getattr(kernels, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(kernels, name, answer)
        yield
    finally:
        for name, function in kept.items():
            setattr(kernels, name, function)


def _require(module: str, topology: Topology) -> None:
    if importlib.util.find_spec(module) is None:
        raise RuntimeError(
            f"compiling for {topology.name} needs the package {module.replace('_', '-')}, which is "
            "not installed: pip install 'rlds_jax[plan]'"
        )


def _target_config(chip: Chip) -> str:
    """A GpuTargetConfig text proto; what it leaves out does not depend on the chip."""
    assert chip.capability is not None
    major, minor = chip.capability
    hopper = major >= 9
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_core: {233472 if hopper else 167936}
  shared_memory_per_block_optin: {232448 if hopper else 166912}
  core_count: {chip.cores} fpus_per_core: {128 if hopper else 64}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.bandwidth)} l2_cache_size: {chip.l2}
  clock_rate_ghz: {1.98 if hopper else 1.41} device_memory_size: {chip.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {chip.kinds[0]}"
"""
