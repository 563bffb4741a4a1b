"""Writes a policy that a run saved as a Hugging Face directory, which transformers loads.

python -m rlds_jax.export --workdir=runs/tiny --step=best --out=runs/tiny/hf
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import jax.numpy as jnp
from safetensors import SafetensorError

from rlds_jax import commands, saved
from rlds_jax.models import weights


def export(workdir: Path, which: str, out: Path, dtype: str) -> int:
    """Writes the policy of `saved.policy(workdir, which)`, whole or not at all; returns its step.

    Raises:
      OSError: it cannot be read or written.
      ValueError: `out` holds something already, or there is no such policy.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory; give another --out")
    if out.resolve().is_relative_to((workdir / "checkpoints").resolve()):
        raise ValueError(f"{out} is among the run's checkpoints; give another --out")
    step, source, model, params = saved.policy(workdir, which)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as beside:
        whole = Path(beside) / "model"  # made as any directory is, not for its owner alone
        try:
            weights.save(params, model, whole, jnp.dtype(dtype), source=source)
        except SafetensorError as error:
            raise OSError(f"{out} cannot be written: {error}") from error
        whole.replace(out)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workdir", type=Path, required=True, help="of the run")
    parser.add_argument("--step", default="best", help="best (default), last or a number")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", default="bfloat16", choices=dtypes, help="of the weights")
    arguments = parser.parse_args()
    with commands.refuse_bad_input():
        step = export(arguments.workdir, arguments.step, arguments.out, arguments.dtype)
    print(f"the policy after step {step} is in {arguments.out}")


if __name__ == "__main__":
    main()
