"""Hugging Face model directories to sharded parameters and back, both read off `parameter_table`.

Neither way holds the model on the host: loading reads each device's slice of one layer at a time,
saving fetches one tensor at a time.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlds_jax.models import safetensors_dir
from rlds_jax.models.config import ModelConfig
from rlds_jax.models.qwen3 import Parameter, Params, parameter_table

CHUNK_BYTES = 64 * 2**20  # read at once of a parameter without layers
SHARD_BYTES = 5 * 10**9

Bounds = tuple[int, int]

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
    return ModelConfig.from_hf(safetensors_dir.read_object(path))


def load(
    directory: str | Path, dtype=jnp.float32, shardings: Params | None = None
) -> tuple[ModelConfig, Params]:
    """Loads a model directory (one safetensors file, or shards with an index).

    Every tensor's presence, shape and dtype is checked before anything is allocated. Each device's
    slice is read from the file a layer, or CHUNK_BYTES, at a time and written into the array on the
    device: beyond that the host holds nothing.

    Args:
      dtype: of the parameters.
      shardings: a tree of NamedShardings like the parameters (sharding.parameter_shardings), None
        for whole arrays on one device.

    Raises:
      FileNotFoundError: no config.json or no safetensors file.
      ValueError: a file is damaged, or tensors are missing, unexpected, of another shape or of a
        dtype that cannot be read; all are named.
    """
    directory = Path(directory)
    config = load_config(directory)
    table = parameter_table(config)
    files = safetensors_dir.TensorFiles(directory)
    shapes = {name: p.hf_shape for p in table.values() for name in p.hf_names}
    files.check(shapes, ignored={"lm_head.weight"} if config.tie_embeddings else ())
    if shardings is None:
        mesh = Mesh(np.asarray(jax.local_devices()[:1]), "device")
        target = dict.fromkeys(table, NamedSharding(mesh, PartitionSpec()))
    else:
        target = traverse_util.flatten_dict(shardings, sep="/")
    flat = {
        path: _stream(files, parameter, jnp.dtype(dtype), target[path])
        for path, parameter in table.items()
    }
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

    If it holds a model, that one stays whole until the new one is. Of the host's memory it takes
    the file being written and one tensor.

    Args:
      params: the parameters, on devices of this process.
      dtype: of the stored tensors.
      source: a model or tokenizer directory whose COMPANIONS are copied, and whose config.json
        supplies the fields ours lacks.
      shard_bytes: above this size the tensors are split over several files with an index.
    """
    fields = config.to_hf() | {"dtype": jnp.dtype(dtype).name}
    beside = {}
    if source is not None:
        held = {path.name: path for path in Path(source).iterdir() if path.is_file()}
        beside = {name: held[name].read_bytes() for name in COMPANIONS if name in held}
        if "config.json" in held:
            fields = safetensors_dir.read_object(held["config.json"]) | fields
            fields.pop("torch_dtype", None)  # the older name of "dtype"
    beside["config.json"] = (json.dumps(fields, indent=2) + "\n").encode()
    sizes = {
        name: math.prod(parameter.hf_shape) * jnp.dtype(dtype).itemsize
        for parameter in parameter_table(config).values()
        for name in parameter.hf_names
    }
    tensors = to_hf_tensors(params, config, dtype)
    safetensors_dir.write(Path(directory), tensors, sizes, shard_bytes, beside)


def to_hf_tensors(params: Params, config: ModelConfig, dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Checkpoint tensors, name and value in the checkpoint's orientation, fetched one by one.

    They are cast and turned on the device.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    for path, parameter in parameter_table(config).items():
        turn = functools.partial(
            _to_hf, dtype=jnp.dtype(dtype), order=parameter.hf_order, shape=parameter.hf_shape
        )
        for layer, name in enumerate(parameter.hf_names):
            yield name, np.asarray(turn(flat[path], layer if parameter.stacked else None))


@functools.partial(jax.jit, static_argnames=("dtype", "order", "shape"))
def _to_hf(array, layer, *, dtype, order, shape):
    own = array if layer is None else lax.dynamic_index_in_dim(array, layer, keepdims=False)
    return own.astype(dtype).transpose(order).reshape(shape)


def _stream(
    files: safetensors_dir.TensorFiles, parameter: Parameter, dtype: Any, sharding: NamedSharding
) -> jax.Array:
    """One parameter, its shards filled side by side in steps along their first axis."""
    shape = parameter.shape
    length = sharding.shard_shape(shape)[0]
    row_bytes = shape[0] // length * math.prod(shape[1:]) * dtype.itemsize
    step = 1 if parameter.stacked else min(length, max(1, CHUNK_BYTES // row_bytes))
    array = jnp.zeros(shape, dtype, device=sharding)
    for start in range(0, length, step):
        block = _block(files, parameter, sharding, start, min(step, length - start))
        array = jax.block_until_ready(_write(array, block, start, sharding))
        del block  # before the next is read
    return array


def _block(
    files: safetensors_dir.TensorFiles,
    parameter: Parameter,
    sharding: NamedSharding,
    start: int,
    rows: int,
) -> jax.Array:
    """Rows [start, start + rows) of every shard of a parameter, sharded like it."""
    length = sharding.shard_shape(parameter.shape)[0]
    shape = (parameter.shape[0] // length * rows, *parameter.shape[1:])

    @functools.cache  # replicas share one read
    def read(first: Bounds, *rest: Bounds) -> np.ndarray:
        begin = first[0] // rows * length + start
        return _read(files, parameter, [(begin, begin + rows), *rest])

    def shard(index: Any) -> np.ndarray:
        return read(*(s.indices(size)[:2] for s, size in zip(index, shape, strict=True)))

    return jax.make_array_from_callback(shape, sharding, shard)


def _read(
    files: safetensors_dir.TensorFiles, parameter: Parameter, bounds: Sequence[Bounds]
) -> np.ndarray:
    """A slice of a parameter (of one layer of it), ours in shape and the file's in dtype."""
    (layer, _), *rest = bounds
    own_bounds = rest if parameter.stacked else bounds
    cuts, split, late = [], [], [slice(None)] * len(own_bounds)
    for slowest, *others in parameter.hf_dims:
        width = math.prod(parameter.own_shape[axis] for axis in others)
        low, high = own_bounds[slowest]
        cuts.append(slice(low * width, high * width))
        split += [high - low, *(parameter.own_shape[axis] for axis in others)]
        for axis in others:  # not one slice of the file, so cut once it is split off
            late[axis] = slice(*own_bounds[axis])
    name = parameter.hf_names[layer if parameter.stacked else 0]
    array = files.read(name, tuple(cuts)).reshape(split)
    array = array.transpose(np.argsort(parameter.hf_order))[tuple(late)]
    return array[None] if parameter.stacked else array


@functools.partial(jax.jit, static_argnames="sharding", donate_argnames="array")
def _write(array, block, start, sharding: NamedSharding):
    """Every device writes its shard of `block` at `start` of its shard of `array`, in place."""

    def write(own, block, start):
        return lax.dynamic_update_slice_in_dim(own, block.astype(own.dtype), start, axis=0)

    spec = sharding.spec
    specs = (spec, spec, PartitionSpec())
    return jax.shard_map(write, mesh=sharding.mesh, in_specs=specs, out_specs=spec)(
        array, block, start
    )
