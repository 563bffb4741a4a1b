"""Attention kernels for accelerators over packed rows, forward and backward.

Same contract as `models/attention.py`: queries [B, L, H, hd], keys and values [B, L, KV, hd],
segment_ids [B, L], 0 = padding. They are JAX's own kernels, given what packing needs; what they
compute for padding is finite and means nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 512  # of the Splash kernel; fewer where a row is shorter


def max_segments(row_length: int) -> int:
    """Segments of a row that `cudnn` can tell apart; packing puts no more into one.

    cuDNN launches work for every segment there could be, so this is far below the row's length.
    """
    return max(row_length // 64, 64)


def splash(q, k, v, segment_ids, *, interpret: bool = False):
    """The TPU kernel; skips key blocks after a query block. L must be a multiple of 128."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    length, heads = q.shape[1:3]
    block = next(n for n in (BLOCK, 256, 128, length) if length % n == 0)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * heads),
        block_sizes=sizes,
        interpret=interpret,
    )

    def row(q, k, v, segments):
        q, k, v = (x.swapaxes(0, 1) for x in (q * q.shape[-1] ** -0.5, k, v))
        return kernel(q, k, v, kernels.SegmentIds(segments, segments)).swapaxes(0, 1)

    return jax.vmap(row)(q, k, v, segment_ids)


def pallas(q, k, v, segment_ids, *, interpret: bool = False):
    """The Triton kernel for GPUs. L must be a multiple of its block of 128, or below it."""
    from jax.experimental.pallas.ops.gpu import attention as kernels

    k, v = _per_query_head(q, k, v)
    scale = q.shape[-1] ** -0.5
    return kernels.mha(q, k, v, segment_ids, sm_scale=scale, causal=True, interpret=interpret)


def cudnn(q, k, v, segment_ids):
    """cuDNN's packed attention (Hopper and later, 16 bit).

    Rows may hold at most `max_segments` segments. Keys and values are repeated to the query heads:
    jax 0.10 computes the offsets of both with the number of query heads.
    """
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    valid = (segment_ids > 0)[:, :, None, None]
    k, v = _per_query_head(q, k, v)
    # No segment covers padding, so nothing is computed there: neither values nor gradients.
    q, k, v = (jnp.where(valid, x, 0) for x in (q, k, v))
    lengths, starts = segment_bounds(segment_ids, max_segments(q.shape[1]))
    starts = jnp.pad(starts, [(0, 0), (0, 1)], constant_values=-1)
    out = kernels.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=q.shape[-1] ** -0.5,
        mask_type=kernels.MaskType.PADDING_CAUSAL,
    )
    return jnp.where(valid, out, 0)


def segment_bounds(segment_ids, segments: int):
    """Lengths and first positions of a row's segments in order, [B, segments] int32, -1 after."""

    def row(ids):
        changes = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
        rank = jnp.cumsum(changes & (ids > 0)) - 1
        place = jnp.where(ids > 0, rank, segments)
        counts = jnp.zeros(segments + 1, jnp.int32).at[place].add(1)[:segments]
        starts = jnp.full(segments + 1, len(ids), jnp.int32).at[place].min(jnp.arange(len(ids)))
        used = counts > 0
        return jnp.where(used, counts, -1), jnp.where(used, starts[:segments], -1)

    return jax.vmap(row)(segment_ids)


def _per_query_head(q, k, v):
    repeats = q.shape[2] // k.shape[2]
    return (jnp.repeat(x, repeats, axis=2) for x in (k, v))
