"""Causal self-attention over packed rows: a token attends to earlier tokens of its own segment.

Every implementation takes queries [B, L, H, hd], keys and values [B, L, KV, hd] and segment_ids
[B, L] (0 = padding), computes the softmax in float32, and returns [B, L, H, hd].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a fully masked block gives no NaN


def attend(q, k, v, segment_ids, *, implementation: str = "auto"):
    """Attention by name: "dense", "blockwise", or "auto" (DESIGN "Models").

    Raises:
      ValueError: the name is unknown.
    """
    if implementation == "auto":
        implementation = "dense" if q.shape[1] <= 1024 else "blockwise"
    if implementation == "dense":
        return dense(q, k, v, segment_ids)
    if implementation == "blockwise":
        return dense(q, k, v, segment_ids)
    raise ValueError(f"attention {implementation!r} is unknown; use auto, dense or blockwise")


def dense(q, k, v, segment_ids):
    """The reference: all [L, L] scores at once."""
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("blkgd,bmkd->bkglm", q, k, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones((length, length), bool))
    mask = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])
    scores = jnp.where(mask[:, None, None], scores * head_dim**-0.5, MASKED)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkglm,bmkd->blkgd", probabilities, v)
    return out.reshape(batch, length, heads, head_dim)
