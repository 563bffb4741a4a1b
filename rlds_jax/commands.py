"""What every command shares: --config with overrides, --workdir, clear errors for bad input."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, as path[:variants].")
flags.DEFINE_string("workdir", None, "Where everything the command makes goes.")
flags.mark_flags_as_required(["config", "workdir"])


def run(main: Callable[[ConfigDict, Path], None]) -> None:
    """Parses the command line and calls `main` with the locked config and the workdir."""
    logging.set_verbosity(logging.WARNING)  # jax tells at INFO which backends are absent
    app.run(lambda _: main(_CONFIG.value, Path(flags.FLAGS.workdir)), flags_parser=_parse)


@contextlib.contextmanager
def refuse_bad_input() -> Iterator[None]:
    """Ends the program with the message alone, exit code 2, where the input does not hold."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _parse(argv: Sequence[str]) -> list[str]:
    with refuse_bad_input():
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:
            raise ValueError(f"{error}\nsee --help") from error
        except (AttributeError, KeyError) as error:
            raise ValueError(f"the config has no such field: {error.args[0]}") from error
