"""What depth adds to the compilation of Qwen3-4B's update.

    python -m experiments.record compile_time experiments.benchmarks.compile_time

The update of configs/hotpotqa.py, with Pallas attention, is traced and compiled for 8 x H100 with 4
and with 36 layers. Seconds are of CPU time over all threads. It needs the extra `plan`, no
accelerator and no network.
"""

from __future__ import annotations

import dataclasses
import json
import time

import jax
from absl import app

from configs import hotpotqa
from rlds_jax import plan, sharding, topology
from rlds_jax.models.config import QWEN3_4B

TOPOLOGY = "h100:8"
LAYERS = (1, 4, 36)  # the first pays for what is done once


def seconds(layers: int) -> float:
    target = topology.parse(TOPOLOGY)
    mesh = sharding.make_mesh(devices=topology.devices(target))
    model = dataclasses.replace(QWEN3_4B, num_layers=layers)
    started = time.process_time()
    with topology.absent(target.chip):
        plan.program(hotpotqa.get_config(), model, mesh, "pallas").lower().compile()
    return time.process_time() - started


def main(argv: list[str]) -> None:
    del argv
    jax.config.update("jax_platforms", "cpu")
    taken = {str(layers): seconds(layers) for layers in LAYERS}
    print(json.dumps({"topology": TOPOLOGY, "seconds": taken}, indent=1))


if __name__ == "__main__":
    app.run(main)
