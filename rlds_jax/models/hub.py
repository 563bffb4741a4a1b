"""A model by hub id or local directory."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]


def local_directory(path: str) -> Path:
    """The directory of a model; a hub id is downloaded into the hub's own cache.

    Raises:
      ValueError: neither a directory nor a model the hub can give.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if path.startswith(("/", ".", "~")):
        raise ValueError(f"model.path {path!r} is not a directory")
    try:
        return Path(snapshot_download(path, allow_patterns=PATTERNS))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"model.path {path!r} is no directory, and the hub did not give it: {error}"
        ) from error
