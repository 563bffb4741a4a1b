"""Trains a policy with RLDS.

    python -m rlds_jax.train --config=configs/frozenlake.py:tiny --workdir=runs/tiny

Any field of the config can be set: --config.rollout.group_size=8.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from rlds_jax import commands, summary
from rlds_jax.trainer import Trainer


def main(config: ConfigDict, workdir: Path) -> None:
    with commands.refuse_bad_input():
        trainer = Trainer(config, workdir)
    try:
        trainer.run()
    finally:
        trainer.close()
    print(summary.text(summary.write(workdir), workdir))


if __name__ == "__main__":
    commands.run(main)
