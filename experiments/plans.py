"""What the paper's updates take on 8 x H100 and on a TPU slice, by compiling them for both.

    python -m experiments.plans --format=json

runs `rlds_jax.plan` on each config at paper scale; it needs the extra `plan`, no accelerator and no
network, and takes a quarter of an hour on one CPU core. The slice is the one that the config's
docstring names.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import app, flags

from rlds_jax.models.config import QWEN3_4B, ModelConfig

FORMAT = flags.DEFINE_enum("format", "table", ["table", "json"], "How to print the result.")
CONFIGS = ("frozenlake", "hotpotqa", "scienceworld", "deepresearch")
COMPILERS = ("jax-cuda12-plugin", "libtpu", "nvidia-cudnn-cu12")
GPUS, SLICE = "h100:8", "v5p:2x2x2"


def plan(config: str, topology: str, model: ModelConfig = QWEN3_4B) -> dict[str, Any]:
    """The result of `rlds_jax.plan` in a process of its own, which a TPU's compiler needs."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(model.to_hf()))
        command = [sys.executable, "-m", "rlds_jax.plan", f"--config=configs/{config}.py"]
        command += [f"--topology={topology}", f"--config.model.path={directory}", "--format=json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout.startswith("{"):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    found, _ = json.JSONDecoder().raw_decode(done.stdout)  # advice follows where it does not fit
    return {"config": config, **found}


def main(argv: list[str]) -> None:
    del argv
    plans = [plan(config, topology) for topology in (GPUS, SLICE) for config in CONFIGS]
    compilers = {name: importlib.metadata.version(name) for name in COMPILERS}
    result = {"compilers": compilers, "plans": plans}
    if FORMAT.value == "json":
        print(json.dumps(result, indent=1))
        return
    for each in plans:
        print(
            f"{each['config']:<14}{each['topology']:<11}{'fits' if each['fits'] else 'too large'}"
        )


if __name__ == "__main__":
    app.run(main)
