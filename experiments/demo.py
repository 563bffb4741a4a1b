"""Times `make demo` as a stranger runs it: a new clone, a new virtual environment.

    python -m experiments.record demo experiments.demo

Prints the seconds of the set-up and of the run, and the run's summary.json. Takes about six minutes
on two CPU cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent


def measure(directory: Path) -> dict[str, Any]:
    """Clones the last commit into `directory` and runs the demo there."""
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, directory], check=True)
    started = time.monotonic()
    _make(directory, ".venv/.core")
    installed = time.monotonic()
    _make(directory, "demo")
    summary = json.loads((directory / "runs/demo/summary.json").read_text())
    return {
        "install_s": installed - started,
        "run_s": time.monotonic() - installed,
        "summary": summary,
    }


def _make(directory: Path, target: str) -> None:
    command = ["make", target, f"PYTHON={sys.executable}"]
    subprocess.run(command, cwd=directory, stdout=sys.stderr, check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(Path(directory) / "clone"), indent=1))
