"""Jitted prefill and decode of the local engine over a paged key-value cache.

Let R be rows (requests in one dispatch), C tokens of one prefill chunk, P pages of S positions,
W the pages of the longest sequence, D hidden, H / KV query and key-value heads, G = H / KV,
hd head_dim, V the vocabulary.

The cache is one pair of arrays per layer, donated and updated in place: keys [P, KV, hd, S] and
values [P, KV, S, hd]. Page 0 is scratch: padding writes there and nobody reads it. A row finds its
positions through its page table [W]; position p lies in page table[p // S] at offset p % S.

Batch invariance (DESIGN "Engines"): a token's numbers must not depend on what shares its dispatch,
nor on whether decode or prefill computed them. Each page's share of the attention is computed by
itself, and shares are merged in page order by exact operations. What remains is the order in which
XLA's CPU matrix library accumulates; measured, it depends on the number of rows when a weight is
[in, out] but not when it is [out, in], nor for small batched products. So the engine's weights are
[out, in], sums over features are products with ones, and `invariant_rows` checks.
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

SCRATCH_PAGE = 0
ROW_CANDIDATES = (8, 16, 32, 48, 64, 128, 256)
PREFILL_TILE = 2  # chunks that walk their pages together
DECODE_PAGES = 64  # most pages, of any rows, that decode visits at once
BATCHED_ROWS = 48  # of one small batched product; beyond, the order of accumulation may change
CDF_BLOCK = 128
NEGATIVE = -1e30  # finite, so that a fully masked page gives exp(0) * 0 and not NaN


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


class Share(NamedTuple):
    """Attention over some pages: out [..., hd] and total [...], both in units of 2 ** top [...]."""

    top: jax.Array
    total: jax.Array
    out: jax.Array


def _nothing(shape) -> Share:
    """The share of no page, for queries of shape [..., hd]."""
    return Share(jnp.full(shape[:-1], NEGATIVE), jnp.zeros(shape[:-1]), jnp.zeros(shape))


def _attend_pages(q, keys, values, pages, last, visible) -> Share:
    """The share of one page for each of N groups of queries.

    Args:
      q: [N, KV, M, hd], scaled so that weights are powers of two.
      keys, values: one layer of the cache.
      pages: [N] page of each group.
      last: [N] last offset in the page that holds anything. What lies behind is replaced by zero:
        a stale NaN would survive a weight of zero.
      visible: [N, M, S] bool.
    """
    k = keys[pages].astype(jnp.float32)
    written = (jnp.arange(values.shape[2]) <= last[:, None])[:, None, :, None]
    v = jnp.where(written, values[pages].astype(jnp.float32), 0.0)
    visible = visible[:, None]
    scores = jnp.where(visible, _batched_product(q, k), NEGATIVE)
    top = jnp.ceil(scores.max(-1))
    weights = jnp.exp((scores - top[..., None]) * np.float32(np.log(2)))
    weights = jnp.where(visible, weights, 0.0)
    return Share(top, _pairwise_sum(weights), _batched_product(weights, v))


def _batched_product(a, b):
    """[N, KV, M, K] times [N, KV, K, n]."""
    parts = [a[:, :, i : i + BATCHED_ROWS] for i in range(0, a.shape[2], BATCHED_ROWS)]
    return jnp.concatenate([jnp.einsum("hkmi,hkio->hkmo", part, b) for part in parts], axis=2)


def _merge(a: Share, b: Share) -> Share:
    """Adds two shares. Scaling by powers of two is exact, so only the order of merging counts."""
    top = jnp.maximum(a.top, b.top)
    left, right = _power_of_two(a.top - top), _power_of_two(b.top - top)
    out = a.out * left[..., None] + b.out * right[..., None]
    return Share(top, a.total * left + b.total * right, out)


def _power_of_two(exponent):
    """2 ** exponent, exactly, for whole exponents of at most 0; 0 below the normal range."""
    biased = jnp.maximum(exponent, -127).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(biased << 23, jnp.float32)


def _pairwise_sum(x):
    """Sum over the last axis, a power of two long, in an order no compiler changes."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _scaled(q):
    """Queries whose products with keys are exponents of two."""
    return q.astype(jnp.float32) * np.float32(q.shape[-1] ** -0.5 / np.log(2))


def chunk_attention(q, positions, keys, values, tables):
    """Causal attention of chunks of consecutive tokens over their pages.

    Args:
      q: [N, C, H, hd].
      positions: [N, C] int32, ascending along C.
      keys, values: one layer of the cache, the chunks' own tokens included.
      tables: [N, W] int32.

    Returns:
      [N, C, H, hd] in q's dtype.
    """
    n, c, h, hd = q.shape
    kv, page_size = keys.shape[1], keys.shape[3]
    grouped = _scaled(q).reshape(n, c, kv, h // kv, hd).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(n, kv, -1, hd)
    last = positions.max(-1)
    offsets = jnp.arange(page_size)

    def tile(part: slice):
        def visit(page, share):
            start = page * page_size
            visible = start + offsets <= jnp.tile(positions[part], (1, h // kv))[:, :, None]
            pages = tables[part, page]
            here = _attend_pages(grouped[part], keys, values, pages, last[part] - start, visible)
            return _merge(share, here)

        pages = last[part].max() // page_size + 1
        share = lax.fori_loop(0, pages, visit, _nothing(grouped[part].shape))
        return share.out / share.total[..., None]

    size = min(PREFILL_TILE, n)
    attended = jnp.concatenate([tile(slice(i, i + size)) for i in range(0, n, size)])
    attended = attended.reshape(n, kv, h // kv, c, hd).transpose(0, 3, 1, 2, 4)
    return attended.reshape(n, c, h, hd).astype(q.dtype)


class Visits(NamedTuple):
    """The pages of all rows in one list, so that short rows cost no more than their own.

    Attributes:
      rows, pages: [n] the row and the page of each visit; padded with the scratch page.
      last: [n] last visible offset in the page, negative where padded.
      total: visits that are real.
      starts, lengths: [R] each row's first visit and number of visits.
    """

    rows: jax.Array
    pages: jax.Array
    last: jax.Array
    total: jax.Array
    starts: jax.Array
    lengths: jax.Array


def _list_visits(positions, tables, page_size: int) -> Visits:
    """Visits of rows at positions [R] with tables [R, W]."""
    num_rows, width = tables.shape
    lengths = positions // page_size + 1
    ends = jnp.cumsum(lengths)
    starts = ends - lengths
    size = _visits_at_once(num_rows)
    index = jnp.arange(-(-num_rows * width // size) * size)
    rows = jnp.minimum((ends <= index[:, None]).sum(-1), num_rows - 1)
    order = jnp.clip(index - starts[rows], 0, width - 1)
    real = index < ends[-1]
    return Visits(
        rows,
        jnp.where(real, tables[rows, order], SCRATCH_PAGE),
        jnp.where(real, positions[rows] - order * page_size, -1),
        ends[-1],
        starts,
        lengths,
    )


def _visits_at_once(num_rows: int) -> int:
    return min(DECODE_PAGES, num_rows)


def row_attention(q, keys, values, visits: Visits):
    """Attention of single tokens [R, H, hd] over their pages; what `chunk_attention` gives."""
    num_rows, h, hd = q.shape
    kv, page_size = keys.shape[1], keys.shape[3]
    grouped = _scaled(q).reshape(num_rows, kv, h // kv, hd)
    size = _visits_at_once(num_rows)

    def visit(i, shares):
        rows, pages, last = (
            lax.dynamic_slice_in_dim(x, i * size, size)
            for x in (visits.rows, visits.pages, visits.last)
        )
        visible = jnp.broadcast_to(
            (jnp.arange(page_size) <= last[:, None])[:, None], (size, h // kv, page_size)
        )
        here = _attend_pages(grouped[rows], keys, values, pages, last, visible)
        return jax.tree.map(
            lambda all_, x: lax.dynamic_update_slice_in_dim(all_, x, i * size, 0), shares, here
        )

    def merge(order, share):
        index = jnp.minimum(visits.starts + order, len(visits.rows) - 1)
        valid = order < visits.lengths
        here = jax.tree.map(lambda x: x[index], shares)
        here = jax.tree.map(
            lambda x, none: jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), x, none),
            here,
            _nothing(grouped.shape),
        )
        return _merge(share, here)

    shares = _nothing((len(visits.rows), *grouped.shape[1:]))
    shares = lax.fori_loop(0, (visits.total + size - 1) // size, visit, shares)
    share = lax.fori_loop(0, visits.lengths.max(), merge, _nothing(grouped.shape))
    return (share.out / share.total[..., None]).reshape(q.shape).astype(q.dtype)


def linear(x, weight):
    """x [n, in] times weight [out, in]."""
    return jnp.einsum("nd,fd->nf", x, weight)


def _row_sums(x):
    """[...] sums over the last axis of x [..., n]."""
    ones = jnp.ones((8, x.shape[-1]), x.dtype)
    return linear(x.reshape(-1, x.shape[-1]), ones)[:, 0].reshape(x.shape[:-1])


def rms_norm(x, scale, eps: float):
    """`qwen3.rms_norm`, accumulated in one order whatever the number of rows."""
    x32 = x.astype(jnp.float32)
    mean = _row_sums(x32 * x32)[..., None] / x.shape[-1]
    return (x32 * lax.rsqrt(mean + eps) * scale.astype(jnp.float32)).astype(x.dtype)


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


def sample(logits, seeds, counts, temperatures):
    """Inverse-CDF sampling with one uniform per token, drawn from fold_in(key(seed), index).

    Temperature 0 takes the argmax and reports its log-probability at temperature 1.

    Args:
      logits: [R, V] float32.
      seeds: [R, 2] uint32 key data; counts: [R] index of the token; temperatures: [R].

    Returns:
      ids [R] int32 and logprobs [R] float32 at the sampling temperature.
    """
    greedy = temperatures <= 0
    inverse = 1 / jnp.where(greedy, 1.0, temperatures)
    top = logits.max(-1)
    mass = jnp.exp((logits - top[:, None]) * inverse[:, None])
    mass = jnp.pad(mass, ((0, 0), (0, -mass.shape[1] % CDF_BLOCK)))
    blocks = mass.reshape(len(mass), -1, CDF_BLOCK)
    cdf = jnp.cumsum(_row_sums(blocks), axis=-1)
    total = cdf[:, -1]
    ids = _inverse_cdf(blocks, cdf, _uniform(seeds, counts) * total)
    ids = lax.cond(  # argmax costs more than all the rest
        greedy.any(),
        lambda: jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), ids),
        lambda: ids,
    )
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0]
    return ids, (chosen - top) * inverse - jnp.log(total)


def _uniform(seeds, counts):
    """[R] float32 in [0, 1 - 2^-23]."""
    keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")
    return jax.vmap(lambda key, n: jax.random.uniform(jax.random.fold_in(key, n)))(keys, counts)


def _inverse_cdf(blocks, cdf, target):
    """First index whose cumulative mass exceeds target: the block first, then inside it.

    Rounding inside the block may leave no such index; the last one with any mass is taken then.
    """
    block = jnp.minimum((cdf <= target[:, None]).sum(-1), cdf.shape[1] - 1)[:, None]
    before = jnp.take_along_axis(jnp.pad(cdf, ((0, 0), (1, 0))), block, axis=1)
    mass = jnp.take_along_axis(blocks, block[..., None], axis=1)[:, 0]
    within = (jnp.cumsum(mass, axis=-1) + before <= target[:, None]).sum(-1)
    last = jnp.where(mass > 0, jnp.arange(CDF_BLOCK), 0).max(-1)
    return (block[:, 0] * CDF_BLOCK + jnp.minimum(within, last)).astype(jnp.int32)


def decode(weights, cache, rows: DecodeRows, steps, allowed, *, config, max_steps):
    """Samples up to `steps` tokens per row in one dispatch; rows end at a stop id or their limit.

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
    final = lax.while_loop(lambda c: (c[0] < steps) & c[4].any(), step, start)
    t, _, _, counts, _, ids, logprobs, cache = final
    return cache, ids, logprobs, counts - rows.counts, t


def _decode_forward(weights, config, cache, tokens, positions, tables, active):
    """Final hidden states [R, D] of one token per row; idle rows write to the scratch page."""
    page_size = cache.keys[0].shape[-1]
    visits = _list_visits(positions, tables, page_size)
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
