"""Attention over a paged cache, for decode and prefill, with equal bits from both.

Let R be rows of one token each, N chunks of C tokens, P pages of S positions, W the pages of the
longest sequence, H / KV query and key-value heads, hd head_dim.

Each page's share of the attention is computed by itself, relative to a maximum of its own that is a
whole power of two, and shares are merged in page order. Rescaling by powers of two is exact, so the
result does not depend on how pages are grouped, on what shares a dispatch, or on whether a compiler
fuses a multiplication into an addition. Pages behind a position change nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SCRATCH_PAGE = 0  # padding writes there and nobody reads it
PREFILL_TILE = 4  # chunks that walk their pages together
DECODE_PAGES = 64  # most pages, of any rows, that decode visits at once
BATCHED_ROWS = 48  # of one small batched product; beyond, the order of accumulation may change
NEGATIVE = -1e30  # finite, so that a fully masked page gives exp(0) * 0 and not NaN


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
      q: [N, KV, M, hd] float32.
      keys, values: one layer of the cache.
      pages: [N] page of each group.
      last: [N] last offset in the page that holds anything. What lies behind is replaced by zero:
        a stale NaN would survive a weight of zero.
      visible: [N, M, S] bool.
    """
    # A gather fused with arithmetic is twice as fast as a bare one, so keys carry the scale.
    scale = np.float32(q.shape[-1] ** -0.5 / np.log(2))
    k = _gather(keys, pages) * scale
    written = (jnp.arange(values.shape[2]) <= last[:, None])[:, None, :, None]
    v = jnp.where(written, _gather(values, pages), 0.0)
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


def _gather(pool, pages):
    return pool.at[pages].get(mode="promise_in_bounds").astype(jnp.float32)


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
    grouped = q.astype(jnp.float32).reshape(n, c, kv, h // kv, hd).transpose(0, 2, 3, 1, 4)
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


def list_visits(positions, tables, page_size: int) -> Visits:
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
    return min(DECODE_PAGES, 2 * num_rows)


def row_attention(q, keys, values, visits: Visits):
    """Attention of single tokens [R, H, hd] over their pages; what `chunk_attention` gives."""
    num_rows, h, hd = q.shape
    kv, page_size = keys.shape[1], keys.shape[3]
    grouped = q.astype(jnp.float32).reshape(num_rows, kv, h // kv, hd)
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
