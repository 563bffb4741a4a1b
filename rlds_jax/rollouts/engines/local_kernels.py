"""Jitted prefill and decode of the local engine over a paged key-value cache.

Let R be rows (requests in one dispatch), C tokens of one prefill chunk, P pages of S positions,
W the pages of the longest sequence, D hidden, H / KV query and key-value heads, G = H / KV,
hd head_dim, V the vocabulary.

The cache is one pair of arrays per layer, donated and updated in place: keys [P, KV, hd, S] and
values [P, KV, S, hd]. Page 0 is scratch: padding writes there and nobody reads it. A row finds its
positions through its page table [W]; position p lies in page table[p // S] at offset p % S.

Batch invariance (DESIGN "Engines"): a token's numbers must not depend on what shares its dispatch,
nor on whether decode or prefill computed them; paged_attention.py and invariant.py see to that, and
`invariant_rows` checks it on the machine at hand.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlds_jax.models import qwen3
from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.engines.invariant import linear, rms_norm
from rlds_jax.rollouts.engines.paged_attention import (
    SCRATCH_PAGE,
    chunk_attention,
    list_visits,
    row_attention,
)
from rlds_jax.rollouts.engines.sampling import sample

ROW_CANDIDATES = (8, 16, 32, 48, 64, 128, 256)


class Weights(NamedTuple):
    """The engine's own copy: one tree per layer, sliced once per update and not per dispatch.

    Attributes:
      embed, unembed: [V, D]; final_norm: [D].
      layers: qkv [(H + 2 KV) hd, D], o [D, H hd], gate_up [2 F, D], down [D, F], and the norms and
        biases as in models/qwen3.py.
      cos, sin: [max_context, hd / 2] of the rotary embedding, computed once for all positions.
    """

    embed: jax.Array
    unembed: jax.Array
    final_norm: jax.Array
    layers: tuple[qwen3.Params, ...]
    cos: jax.Array
    sin: jax.Array


class Cache(NamedTuple):
    """Per layer, keys [P, KV, hd, S] and values [P, KV, S, hd]."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


class DecodeRows(NamedTuple):
    """What one decode dispatch knows of its rows; idle rows have limit 0.

    Attributes:
      tokens: [R] int32, the last token of each row, whose key and value are not cached yet.
      positions: [R] int32, its position.
      tables: [R, W] int32 page tables.
      counts: [R] int32 tokens sampled so far (the index of the next one).
      limits: [R] int32, the count at which the row ends.
      seeds: [R, 2] uint32, key data of each request.
      temperatures: [R] float32, 0 for greedy.
      stop_ids: [R, n] int32, padded with -1.
    """

    tokens: Any
    positions: Any
    tables: Any
    counts: Any
    limits: Any
    seeds: Any
    temperatures: Any
    stop_ids: Any


def prepare(params: qwen3.Params, config: ModelConfig, dtype, max_context: int) -> Weights:
    """Copies parameters into the engine's layout; shares no buffer with `params`."""
    copy = functools.partial(jnp.array, dtype=dtype, copy=True)
    width = config.hidden_size
    embed = copy(params["embed"])

    def layer(index: int) -> qwen3.Params:
        own = {name: p[index] for name, p in params["layers"].items()}
        q, k, v, o, gate, up, down = (
            own.pop(name) for name in ("q", "k", "v", "o", "gate", "up", "down")
        )
        qkv = jnp.concatenate([p.reshape(width, -1) for p in (q, k, v)], axis=1)
        products = {
            "qkv": qkv.T,
            "o": o.reshape(-1, width).T,
            "gate_up": jnp.concatenate([gate, up], axis=1).T,
            "down": down.T,
        }
        return jax.tree.map(copy, {**own, **products})

    weights = Weights(
        embed,
        copy(params["lm_head"]) if "lm_head" in params else embed,
        copy(params["final_norm"]),
        tuple(layer(index) for index in range(config.num_layers)),
        *qwen3.rotary_angles(jnp.arange(max_context), config.head_dim, config.rope_theta),
    )
    return jax.block_until_ready(weights)


def page_bytes(config: ModelConfig, page_size: int, dtype) -> int:
    """Bytes of one page over all layers."""
    per_position = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return per_position * page_size * jnp.dtype(dtype).itemsize


def empty_cache(config: ModelConfig, num_pages: int, page_size: int, dtype) -> Cache:
    heads, width = config.num_kv_heads, config.head_dim
    layers = range(config.num_layers)
    return Cache(
        tuple(jnp.zeros((num_pages, heads, width, page_size), dtype) for _ in layers),
        tuple(jnp.zeros((num_pages, heads, page_size, width), dtype) for _ in layers),
    )


def qkv(layer: qwen3.Params, config: ModelConfig, x, angles):
    """Rotated queries [n, H, hd] and keys [n, KV, hd], and values, of normalised x [n, D]."""
    heads, kv = config.num_heads, config.num_kv_heads
    projected = linear(x, layer["qkv"]).reshape(len(x), heads + 2 * kv, config.head_dim)
    q, k, v = jnp.split(projected, [heads, heads + kv], axis=1)
    return qwen3.finish_qkv(layer, config, q, k, v, angles, norm=rms_norm)


def mlp(layer: qwen3.Params, x):
    gate, up = jnp.split(linear(x, layer["gate_up"]), 2, axis=1)
    return linear(jax.nn.silu(gate) * up, layer["down"])


def _store(cache: Cache, index: int, pages, offsets, k, v) -> Cache:
    """Writes k, v [n, KV, hd] of one layer at (page, offset)."""
    keys = cache.keys[index].at[pages, :, :, offsets].set(k.astype(cache.keys[index].dtype))
    values = cache.values[index].at[pages, :, offsets].set(v.astype(cache.values[index].dtype))
    return Cache(
        cache.keys[:index] + (keys,) + cache.keys[index + 1 :],
        cache.values[:index] + (values,) + cache.values[index + 1 :],
    )


def _run_layer(weights: Weights, config, index: int, cache: Cache, x, positions, pages, attend):
    """One layer over tokens x [n, D], whose keys and values go to `pages` [n].

    Args:
      attend: (q, keys, values) -> attended, or None to stop once keys and values are stored.
    """
    layer, page_size = weights.layers[index], cache.keys[index].shape[-1]
    normed = rms_norm(x, layer["input_norm"], config.rms_norm_eps)
    q, k, v = qkv(layer, config, normed, (weights.cos[positions], weights.sin[positions]))
    cache = _store(cache, index, pages, positions % page_size, k, v)
    if attend is None:
        return x, cache
    attended = attend(q, cache.keys[index], cache.values[index])
    x = x + linear(attended.reshape(len(x), -1), layer["o"])
    return x + mlp(layer, rms_norm(x, layer["post_norm"], config.rms_norm_eps)), cache


def prefill(weights: Weights, cache: Cache, tokens, starts, lengths, tables, *, config) -> Cache:
    """Stores keys and values of chunks; the last prompt token is left to decode.

    Args:
      tokens: [N, C] int32; starts: [N] position of the first; lengths: [N] in 0..C.
      tables: [N, W] int32.
    """
    page_size = cache.keys[0].shape[-1]
    offsets = jnp.arange(tokens.shape[1])
    active = offsets < lengths[:, None]
    positions = starts[:, None] + jnp.where(active, offsets, 0)
    pages = jnp.take_along_axis(tables, positions // page_size, axis=1, mode="clip")
    pages = jnp.where(active, pages, SCRATCH_PAGE).reshape(-1)
    x = weights.embed[tokens.reshape(-1)]

    def attend(q, keys, values):
        q = q.reshape(*tokens.shape, *q.shape[1:])
        return chunk_attention(q, positions, keys, values, tables)

    for index in range(config.num_layers):
        last = index == config.num_layers - 1
        x, cache = _run_layer(
            weights,
            config,
            index,
            cache,
            x,
            positions.reshape(-1),
            pages,
            None if last else attend,
        )
    return cache


def copy_pages(cache: Cache, sources, targets) -> Cache:
    """Copies pages [n] to pages [n] in every layer; pad with the scratch page."""
    return jax.tree.map(lambda pool: pool.at[targets].set(pool[sources]), cache)


def decode(weights, cache, rows: DecodeRows, steps, allowed, *, config, max_steps):
    """Samples up to `steps` tokens per row in one dispatch; rows end at a stop id or their limit.

    The dispatch ends early once a sixteenth of its rows have: others may take their places.

    Args:
      steps: traced int, at most the static `max_steps`.
      allowed: None, or [R, ceil(V / 32)] int32 bitmask of permitted ids (then steps is 1).

    Returns:
      cache, ids [max_steps, R], logprobs [max_steps, R], produced [R] tokens per row, and the
      number of steps run.
    """
    num_rows = rows.tokens.shape[0]

    def step(carry):
        t, tokens, positions, counts, active, ids, logprobs, cache = carry
        x, cache = _decode_forward(weights, config, cache, tokens, positions, rows.tables, active)
        logits = linear(x, weights.unembed).astype(jnp.float32)
        if allowed is not None:
            logits = jnp.where(_unpack(allowed, logits.shape[1]), logits, -jnp.inf)
        sampled, logprob = sample(logits, rows.seeds, counts, rows.temperatures)
        ids = lax.dynamic_update_index_in_dim(ids, sampled, t, 0)
        logprobs = lax.dynamic_update_index_in_dim(logprobs, logprob, t, 0)
        counts = counts + active
        stopped = (sampled[:, None] == rows.stop_ids).any(-1)
        going = active & ~stopped & (counts < rows.limits)
        tokens = jnp.where(going, sampled, tokens)
        positions = positions + going
        return t + 1, tokens, positions, counts, going, ids, logprobs, cache

    start = (
        0,
        rows.tokens,
        rows.positions,
        rows.counts,
        rows.counts < rows.limits,
        jnp.zeros((max_steps, num_rows), jnp.int32),
        jnp.zeros((max_steps, num_rows), jnp.float32),
        cache,
    )
    started = start[4].sum()
    enough = started - jnp.maximum(started // 16, 1)
    final = lax.while_loop(lambda c: (c[0] < steps) & (c[4].sum() > enough), step, start)
    t, _, _, counts, _, ids, logprobs, cache = final
    return cache, ids, logprobs, counts - rows.counts, t


def _decode_forward(weights, config, cache, tokens, positions, tables, active):
    """Final hidden states [R, D] of one token per row; idle rows write to the scratch page."""
    page_size = cache.keys[0].shape[-1]
    visits = list_visits(positions, tables, page_size)
    pages = jnp.take_along_axis(tables, positions[:, None] // page_size, axis=1, mode="clip")[:, 0]
    pages = jnp.where(active, pages, SCRATCH_PAGE)
    x = weights.embed[tokens]
    attend = functools.partial(row_attention, visits=visits)
    for index in range(config.num_layers):
        x, cache = _run_layer(weights, config, index, cache, x, positions, pages, attend)
    return rms_norm(x, weights.final_norm, config.rms_norm_eps), cache


def _unpack(bitmask, vocab_size: int):
    """[R, ceil(V / 32)] int32 to [R, V] bool, least significant bit first."""
    bits = (bitmask[:, :, None] >> jnp.arange(32)) & 1
    return bits.reshape(len(bitmask), -1)[:, :vocab_size].astype(bool)


class Kernels(NamedTuple):
    """The compiled functions of one engine."""

    prefill: Callable[..., Cache]
    decode: Callable[..., Any]
    copy_pages: Callable[..., Cache]


@functools.cache
def build(config: ModelConfig, max_steps: int) -> Kernels:
    """Engines of the same model share their compiled code."""
    return Kernels(
        jax.jit(functools.partial(prefill, config=config), donate_argnums=1),
        jax.jit(functools.partial(decode, config=config, max_steps=max_steps), donate_argnums=1),
        jax.jit(copy_pages, donate_argnums=0),
    )


@functools.cache
def invariant_rows(config: ModelConfig, dtype) -> tuple[int, ...]:
    """Row counts at which everything that is computed per row rounds alike, ascending.

    Measured on this machine, against the largest candidate, which is always in the answer.
    """
    one = dataclasses.replace(config, num_layers=1)
    largest = max(ROW_CANDIDATES)
    # numpy's normal numbers: jax compiles its own for every shape, which takes seconds.
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda p: rng.standard_normal(p.shape, np.float32),
        jax.eval_shape(lambda: qwen3.init_params(one, jax.random.key(0))),
    )
    weights = prepare(params, one, dtype, largest)
    x = jnp.asarray(rng.standard_normal((largest, config.hidden_size)), dtype)

    @jax.jit
    def rowwise(weights: Weights, x):
        (layer,) = weights.layers
        normed = rms_norm(x, layer["input_norm"], config.rms_norm_eps)
        heads = qkv(layer, config, normed, (weights.cos[: len(x)], weights.sin[: len(x)]))
        attended = linear(heads[0].reshape(len(x), -1), layer["o"])
        return normed, *heads, attended, mlp(layer, normed), linear(normed, weights.unembed)

    reference = [np.asarray(y) for y in rowwise(weights, x)]

    def equal(rows: int) -> bool:
        mine = rowwise(weights, x[:rows])
        return all(np.array_equal(a, b[:rows]) for a, b in zip(mine, reference, strict=True))

    return tuple(rows for rows in ROW_CANDIDATES if equal(rows))
