"""Hugging Face safetensors directories to parameters and back, both read off `parameter_table`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import traverse_util
from safetensors.numpy import save_file

from rlds_jax.models.config import ModelConfig
from rlds_jax.models.qwen3 import Parameter, Params, parameter_table

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 4 * 2**30

# What a model directory holds besides config.json and weights.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def load_config(directory: str | Path) -> ModelConfig:
    """Reads config.json.

    Raises:
      FileNotFoundError: there is none.
      ValueError: the file is damaged, or the architecture is not supported.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected a Hugging Face model directory")
    return ModelConfig.from_hf(_read_object(path))


def load(directory: str | Path, dtype=jnp.float32) -> tuple[ModelConfig, Params]:
    """Loads a model directory (one safetensors file, or shards with an index).

    Every tensor's presence and shape is checked before anything is allocated.

    Raises:
      FileNotFoundError: no config.json or no safetensors file.
      ValueError: a file is damaged, or tensors are missing, unexpected or of another shape; all
        are named.
    """
    directory = Path(directory)
    config = load_config(directory)
    table = parameter_table(config)
    where = _tensor_files(directory)
    files = {path: _open(path) for path in set(where.values())}
    held = {path: set(file.keys()) for path, file in files.items()}
    found = {name: files[path] for name, path in where.items() if name in held[path]}
    _check(config, table, found, directory)

    def tensor(name: str, parameter: Parameter) -> np.ndarray:
        own = parameter.shape[1:] if parameter.stacked else parameter.shape
        split = [own[axis] for axis in parameter.hf_order]
        array = files[where[name]].get_tensor(name).reshape(split)
        return array.transpose(np.argsort(parameter.hf_order))

    def stacked(parameter: Parameter) -> jax.Array:
        names = _hf_names(parameter)
        if not parameter.stacked:
            return jnp.array(tensor(names[0], parameter), dtype, copy=True)
        out = np.empty(parameter.shape, dtype)
        for layer, name in enumerate(names):
            out[layer] = tensor(name, parameter)
        return jnp.array(out, copy=True)

    flat = {path: stacked(parameter) for path, parameter in table.items()}
    return config, traverse_util.unflatten_dict(flat, sep="/")


def save(
    params: Params,
    config: ModelConfig,
    directory: str | Path,
    dtype=jnp.bfloat16,
    source: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a directory that transformers loads.

    Args:
      params: the parameters.
      dtype: of the stored tensors.
      source: a model or tokenizer directory whose COMPANIONS are copied, and whose config.json
        supplies the fields ours lacks.
      shard_bytes: above this size the tensors are split over several files with an index.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    hf_config = config.to_hf()
    if source is not None and Path(source).resolve() != directory.resolve():
        for name in COMPANIONS:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, directory / name)
    if source is not None and (Path(source) / "config.json").is_file():
        hf_config = json.loads((Path(source) / "config.json").read_text()) | hf_config
    hf_config["dtype"] = jnp.dtype(dtype).name
    (directory / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    for stale in [*directory.glob("model*.safetensors"), directory / INDEX]:
        stale.unlink(missing_ok=True)
    shards = _shards(to_hf_tensors(params, config, dtype), shard_bytes)
    if len(shards) == 1:
        _write(shards[0], directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        _write(shard, directory / name)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(array.nbytes for shard in shards for array in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def to_hf_tensors(params: Params, config: ModelConfig, dtype) -> dict[str, np.ndarray]:
    """Checkpoint tensors by Hugging Face name, in its orientation."""
    flat = traverse_util.flatten_dict(params, sep="/")
    tensors = {}
    for path, parameter in parameter_table(config).items():
        array = np.asarray(flat[path].astype(dtype))
        layers = array if parameter.stacked else array[None]
        for name, layer in zip(_hf_names(parameter), layers, strict=True):
            turned = layer.transpose(parameter.hf_order).reshape(parameter.hf_shape)
            tensors[name] = np.ascontiguousarray(turned)
    return tensors


def _hf_names(parameter: Parameter) -> list[str]:
    count = parameter.shape[0] if parameter.stacked else 1
    return [parameter.hf_name.format(layer=layer) for layer in range(count)]


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file that holds each tensor."""
    if (directory / INDEX).is_file():
        weight_map = _read_object(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{directory / INDEX}: 'weight_map' must be an object")
        return {name: directory / str(file) for name, file in weight_map.items()}
    single = directory / SINGLE
    if not single.is_file():
        raise FileNotFoundError(f"{directory} holds neither {INDEX} nor {SINGLE}")
    return dict.fromkeys(_open(single).keys(), single)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def _open(path: Path) -> safetensors.safe_open:
    try:
        return safetensors.safe_open(path, "np")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _check(config: ModelConfig, table: dict[str, Parameter], found: dict, directory: Path) -> None:
    expected = {name: p.hf_shape for p in table.values() for name in _hf_names(p)}
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    faults = [f"missing: {name}" for name in sorted(expected.keys() - found.keys())]
    faults += [f"unexpected: {name}" for name in sorted(found.keys() - expected.keys() - ignored)]
    for name in sorted(expected.keys() & found.keys()):
        shape = tuple(found[name].get_slice(name).get_shape())
        if shape != expected[name]:
            faults.append(f"shape: {name} is {shape}, config.json says {expected[name]}")
    if faults:
        raise ValueError(f"{directory} does not match its config.json:\n  " + "\n  ".join(faults))


def _write(tensors: dict[str, np.ndarray], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file leaves it readable by its owner alone


def _shards(tensors: dict[str, np.ndarray], limit: int) -> list[dict[str, np.ndarray]]:
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, array in tensors.items():
        if shards[-1] and size + array.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    return shards
