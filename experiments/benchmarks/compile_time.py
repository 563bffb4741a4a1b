"""What depth adds to the compilation of Qwen3-4B's update.

    python -m experiments.record compile_time experiments.benchmarks.compile_time

The update of configs/hotpotqa.py is compiled for 8 x H100 with 4 and with 36 layers, the
best of two each. It needs the extra `plan`, no accelerator and no network.
"""

from __future__ import annotations

import dataclasses
import json

from absl import app

from experiments.plans import GPUS, plan
from rlds_jax.models.config import QWEN3_4B

LAYERS = (4, 36)


def seconds(layers: int) -> float:
    model = dataclasses.replace(QWEN3_4B, num_layers=layers)
    return plan("hotpotqa", GPUS, model)["compile_seconds"]


def main(argv: list[str]) -> None:
    del argv
    best = {str(layers): min(seconds(layers) for _ in range(2)) for layers in LAYERS}
    print(json.dumps({"topology": GPUS, "seconds": best}, indent=1))


if __name__ == "__main__":
    app.run(main)
