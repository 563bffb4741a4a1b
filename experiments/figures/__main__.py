"""Figures of a training run.

    python -m experiments.figures credit --workdir=runs/demo --step=20
    python -m experiments.figures pivots --workdir=runs/demo
    python -m experiments.figures curves --workdir=runs/demo

Each is written to figures/ in the workdir, or to --out. docs/inspecting.md says what they show.
They need the extra `figures`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.figures import credit, curves, pivots


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    figures = parser.add_subparsers(required=True, metavar="{credit,pivots,curves}")
    for module in (credit, pivots, curves):
        name = module.__name__.rpartition(".")[2]
        command = figures.add_parser(name, help=(module.__doc__ or "").split("\n")[0])
        command.add_argument("--workdir", type=Path, required=True, help="of the run")
        command.add_argument("--out", type=Path, help="PNG to write")
        module.add_arguments(command)
        command.set_defaults(write=module.write)
    arguments = parser.parse_args(argv)
    try:
        print(f"wrote {arguments.write(arguments)}")
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
