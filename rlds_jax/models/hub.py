"""A model by hub id or local directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]


def local_directory(path: str) -> Path:
    """The directory of a model; a hub id is downloaded into the hub's own cache.

    Raises:
      ValueError: neither a directory nor a model the hub can give.
    """
    return _local(path, lambda: snapshot_download(path, allow_patterns=PATTERNS))


def config_directory(path: str) -> Path:
    """Like `local_directory`, but of a hub's model only config.json is downloaded."""
    return _local(path, lambda: str(Path(hf_hub_download(path, "config.json")).parent))


def _local(path: str, download: Callable[[], str]) -> Path:
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if path.startswith(("/", ".", "~")):
        raise ValueError(f"model.path {path!r} is not a directory")
    try:
        return Path(download())
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"model.path {path!r} is no directory, and the hub did not give it: {error}"
        ) from error
