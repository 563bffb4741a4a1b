"""Trains a policy with RLDS, or goes on with a run that was stopped.

    python -m rlds_jax.train --config=configs/frozenlake.py:tiny --workdir=runs/tiny

Any field of the config can be set: --config.rollout.group_size=8. The same command again goes on
after the newest checkpoint in the workdir.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import jax
from ml_collections import ConfigDict

from rlds_jax import commands, processes, summary
from rlds_jax.batch import BatchError
from rlds_jax.rollouts.group import AllRolloutsDropped
from rlds_jax.stopping import StopRequested, StopSignals
from rlds_jax.tasks.base import TaskUnavailable
from rlds_jax.trainer import NonfiniteUpdates, Trainer


def main(config: ConfigDict, workdir: Path) -> None:
    with commands.refuse_bad_input():
        processes.initialise(config.distributed)
    with StopSignals() as signals:
        with commands.refuse_bad_input():
            trainer = Trainer(config, workdir, signals)
        try:
            with contextlib.closing(trainer):
                trainer.run()
            if jax.process_index() == 0:
                print(summary.text(summary.write(workdir), workdir))
        except StopRequested as stop:
            print(
                f"stopped by {stop} after step {trainer.completed} of {config.steps}; "
                "the same command again goes on from there"
            )
            raise SystemExit(0 if stop.number == signal.SIGTERM else 130) from None
        except KeyboardInterrupt:
            print("interrupted; the same command again goes on from the newest checkpoint")
            raise SystemExit(130) from None
        except (BatchError, AllRolloutsDropped, NonfiniteUpdates) as error:
            print(
                f"error: {error}\nWhat was saved is kept. The same command goes on from the newest "
                "checkpoint, with another batch.max_micro too; other fields may need a new workdir",
                file=sys.stderr,
            )
            raise SystemExit(2) from error
        except (OSError, TaskUnavailable) as error:
            print(
                f"error: {error}\nNothing that was saved is lost; when that is mended, the same "
                "command goes on from the newest checkpoint",
                file=sys.stderr,
            )
            raise SystemExit(2) from error


if __name__ == "__main__":
    commands.run(main)
