"""A Hugging Face model directory as files: tensors read in slices, and all of it replaced at once.

Nothing here knows a model; weights.py does.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = ("F16", "BF16", "F32")
_STAGING = ".saving"


class TensorFiles:
    """The tensors of a directory: one safetensors file, or shards with an index.

    Args:
      directory: of the files.

    Raises:
      FileNotFoundError: it holds no weights.
      ValueError: the index is not one, or files are absent, damaged or truncated; they are named,
        with the tensors lost.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[str, safetensors.safe_open] = {}
        faults = []
        for path, listed in _files(directory).items():
            try:
                opened = safetensors.safe_open(path, "np")
            except FileNotFoundError:
                faults += [f"{path} does not exist", *_lost(listed)]
            except safetensors.SafetensorError as error:
                faults += [f"{path} is damaged: {error}", *_lost(_past_end(path) or listed)]
            else:
                held = {*opened.keys()}
                self._files |= dict.fromkeys(held - self._files.keys() | held & listed, opened)
        if faults:
            raise ValueError("\n".join([*faults, "fetch these files again"]))

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: Collection[str] = ()) -> None:
        """Every tensor of `expected` is there in its shape, of DTYPES, and no other but `ignored`.

        Raises:
          ValueError: naming all that are not.
        """
        held = self._files.keys()
        faults = [f"missing: {name}" for name in sorted(expected.keys() - held)]
        faults += [f"unexpected: {name}" for name in sorted(held - expected.keys() - {*ignored})]
        for name in sorted(expected.keys() & held):
            tensor = self._files[name].get_slice(name)
            shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
            if shape != expected[name]:
                faults.append(f"shape: {name} is {shape}, config.json says {expected[name]}")
            if dtype not in DTYPES:
                faults.append(f"dtype: {name} is {dtype}, which is none of {', '.join(DTYPES)}")
        if faults:
            listed = "\n  ".join(faults)
            raise ValueError(f"{self._directory} does not match its config.json:\n  {listed}")

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A new array of tensor[index], in the file's dtype; no more than that is read."""
        return self._files[name].get_slice(name)[index]


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      ValueError: the file holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def write(
    directory: Path,
    tensors: Iterator[tuple[str, np.ndarray]],
    sizes: Mapping[str, int],
    shard_bytes: int,
    beside: Mapping[str, bytes],
) -> None:
    """Replaces the weights of a directory; holds one shard in memory.

    Everything is written under other names first. Then files are renamed, the index last, and old
    shards removed after it: whenever it stops, the directory holds the old weights or the new.

    Args:
      directory: made if absent; other files in it stay.
      tensors: names and values.
      sizes: bytes of each tensor, in the order in which they come.
      shard_bytes: above it they are split over several files with an index.
      beside: contents of further files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    staging = directory / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    shards = _split(sizes, shard_bytes)
    files = _new_names(directory, len(shards))
    for name, content in beside.items():
        (staging / name).write_bytes(content)
    for file, names in zip(files, shards, strict=True):
        _write_shard(dict(itertools.islice(tensors, len(names))), staging / file)
    renamed = [*beside, *files]
    if len(shards) > 1:
        weight_map = {n: file for file, names in zip(files, shards, strict=True) for n in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (staging / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        renamed.append(INDEX)
    for name in renamed:
        (staging / name).replace(directory / name)
    if len(shards) == 1:
        (directory / INDEX).unlink(missing_ok=True)
    for stale in {path.name for path in directory.glob("model*.safetensors")} - {*files}:
        (directory / stale).unlink()
    staging.rmdir()


def _files(directory: Path) -> dict[Path, set[str]]:
    """The safetensors files, each with the tensors that the index expects of it."""
    if not (directory / INDEX).is_file():
        if not (directory / SINGLE).is_file():
            raise FileNotFoundError(f"{directory} holds neither {INDEX} nor {SINGLE}")
        return {directory / SINGLE: set()}
    weight_map = read_object(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{directory / INDEX}: 'weight_map' must be an object")
    files: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(directory / str(file), set()).add(name)
    return files


def _lost(names: Iterable[str]) -> list[str]:
    return [f"  lost: {name}" for name in sorted(names)]


def _past_end(path: Path) -> list[str]:
    """The tensors that reach past the end of a file, as far as its header tells."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, size)))
            ends = {n: entry["data_offsets"][1] for n, entry in header.items() if n[:2] != "__"}
        except (ValueError, TypeError, KeyError, AttributeError):
            return []
    return [name for name, end in ends.items() if 8 + length + end > size]


def _new_names(directory: Path, count: int) -> list[str]:
    """File names of `count` shards, none of them in use by the index that is there."""
    if count == 1:
        return [SINGLE]
    used = {path.name for path in _files(directory)} if (directory / INDEX).is_file() else set()
    candidates = (
        [f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for stem in ("model", "model-b")
    )
    return next(names for names in candidates if used.isdisjoint(names))


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if shards[-1] and total + size > limit:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    return shards


def _write_shard(tensors: dict[str, np.ndarray], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file leaves it readable by its owner alone
