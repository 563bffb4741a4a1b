"""What every command shares: --config with overrides, --workdir, clear errors for bad input."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from rlds_jax.tasks.base import TaskUnavailable

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, as path[:variants].")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where everything the command makes goes.")


def run(main: Callable[..., None], required: Sequence[str] = ("config", "workdir")) -> None:
    """Parses the command line and calls `main` with the locked config and the workdir.

    Args:
      required: flags that must be given; config and workdir are None where they are not.
    """
    logging.set_verbosity(logging.WARNING)  # jax tells at INFO which backends are absent
    flags.mark_flags_as_required(required)

    def start(_: Sequence[str]) -> None:
        with refuse_bad_input():
            if _WORKDIR.value == "":
                raise ValueError("--workdir is empty; name a directory, . for this one")
        main(_CONFIG.value, None if _WORKDIR.value is None else Path(_WORKDIR.value))

    app.run(start, flags_parser=_parse)


@contextlib.contextmanager
def refuse_bad_input() -> Iterator[None]:
    """Ends the program with the message alone, exit code 2, where the input does not hold."""
    try:
        yield
    except (ValueError, OSError, TaskUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _parse(argv: Sequence[str]) -> Any:
    with refuse_bad_input():
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:
            # A config that raises comes with its traceback as text; its last line is the error.
            line = str(error).strip().splitlines()[-1].removeprefix("ValueError: ")
            raise ValueError(f"{line}\nsee --help") from error
        except (AttributeError, KeyError) as error:
            words = str(error.args[0]).strip("'\"")  # quoted again by every section it passed
            if "Did you mean" in words:
                words = "did you mean" + words.rpartition("Did you mean")[2].replace('"', "'")
            raise ValueError(f"the config has no such field: {words}") from error
