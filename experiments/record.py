"""Runs a benchmark and keeps what it prints, with command and versions.

    python -m experiments.record engine experiments.benchmarks.engine --format=json

runs `python -m experiments.benchmarks.engine --format=json` and writes its JSON to
experiments/results/engine.json, which README's tables are made of (experiments/report.py).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax", "torch", "transformers")


def main(name: str, module: str, *flags: str) -> None:
    command = ["-m", module, *flags]
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, check=True)
    record = {
        "command": " ".join(["python", *command]),
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
        "machine": f"{os.cpu_count()} cores, {_processor()}",
        "result": json.loads(done.stdout),
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
