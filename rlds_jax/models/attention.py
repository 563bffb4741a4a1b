"""Causal self-attention over packed rows: a token attends to earlier tokens of its own segment.

Every implementation takes queries [B, L, H, hd], keys and values [B, L, KV, hd] and segment_ids
[B, L] (a segment is contiguous; 0 = padding), computes the softmax in float32, and returns
[B, L, H, hd].
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from rlds_jax.models import flash
from rlds_jax.models.partition import spec

Implementation = Literal["dense", "blockwise", "splash", "pallas", "cudnn"]
Choice = Literal["auto", "dense", "blockwise", "splash", "pallas", "cudnn"]

MASKED = -1e30  # finite: a block without any allowed pair gives no NaN


def attend(q, k, v, segment_ids, *, implementation: Choice, mesh: Mesh | None = None):
    """Attention by name; on a mesh every device attends over its own rows and heads.

    Raises:
      ValueError: the name is unknown, or "auto", which models/attention_gate.py settles.
    """
    functions = {
        "dense": dense,
        "blockwise": blockwise,
        "splash": flash.splash,
        "pallas": flash.pallas,
        "cudnn": flash.cudnn,
    }
    if implementation not in functions:
        raise ValueError(f"attention {implementation!r} is unknown; use one of {list(functions)}")
    function = functions[implementation]
    if mesh is None or mesh.size == 1:
        return function(q, k, v, segment_ids)
    arrays = (q, k, v, segment_ids)
    axes = [("rows", None, heads, None) for heads in ("heads", "kv_heads", "kv_heads")]
    specs = tuple(
        spec(mesh, a, x.shape) for a, x in zip([*axes, ("rows", None)], arrays, strict=True)
    )
    local = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return local(*arrays)


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


def blockwise(q, k, v, segment_ids, *, block: int = 64):
    """Online softmax over key blocks, forward and backward; memory is linear in L.

    Key blocks after a query block, and those before the first segment that the query block (in any
    row) belongs to, are not visited. The backward pass recomputes the scores from the saved
    normaliser (the FlashAttention recurrence).

    Args:
      block: tokens of a query or key block.
    """
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    block = min(block, length)
    pad = -length % block

    def heads_first(x):
        """[B, L, KV * G, hd] to [B, KV, blocks, block * G, hd]: the group of a key head folded."""
        x = jnp.pad(x, [(0, 0), (0, pad), (0, 0), (0, 0)])
        x = x.reshape(batch, length + pad, kv_heads, -1, head_dim).swapaxes(1, 2)
        return x.reshape(batch, kv_heads, (length + pad) // block, -1, head_dim)

    segments = jnp.pad(segment_ids, [(0, 0), (0, pad)]).reshape(batch, -1, block)
    out = _blockwise(heads_first(q * head_dim**-0.5), heads_first(k), heads_first(v), segments)
    out = out.reshape(batch, kv_heads, length + pad, heads // kv_heads, head_dim)
    return out.swapaxes(1, 2).reshape(batch, length + pad, heads, head_dim)[:, :length]


@jax.custom_vjp
def _blockwise(q, k, v, segments):
    """Scaled q [B, KV, n, block * G, hd], k and v [B, KV, n, block, hd], segments [B, n, block]."""
    return _blockwise_forward(q, k, v, segments)[0]


def _blockwise_forward(q, k, v, segments):
    first = _first_key_block(segments)

    def query_block(i):
        q_i = _block(q, i)

        def key_block(j, carry):
            peak, normaliser, out = carry
            scores = _scores(q_i, _block(k, j), segments, i, j)
            new_peak = jnp.maximum(peak, scores.max(-1))
            weights = jnp.exp(scores - new_peak[..., None])
            decay = jnp.exp(peak - new_peak)
            out = out * decay[..., None] + _dot("bkqm,bkmd->bkqd", weights, _block(v, j))
            return new_peak, normaliser * decay + weights.sum(-1), out

        start = (
            jnp.full(q_i.shape[:-1], MASKED, jnp.float32),
            jnp.zeros(q_i.shape[:-1], jnp.float32),
            jnp.zeros(q_i.shape, jnp.float32),
        )
        # The diagonal comes first: there every query sees a key, so the peak is a real score.
        carry = key_block(i, start)
        peak, normaliser, out = lax.fori_loop(first[i], i, key_block, carry)
        return (out / normaliser[..., None]).astype(q.dtype), peak + jnp.log(normaliser)

    out, normaliser = lax.map(query_block, jnp.arange(q.shape[2]))
    out, normaliser = jnp.moveaxis(out, 0, 2), jnp.moveaxis(normaliser, 0, 2)
    return out, (q, k, v, segments, out, normaliser)


def _blockwise_backward(residuals, d_out):
    q, k, v, segments, out, normaliser = residuals
    first = _first_key_block(segments)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def query_block(carry, i):
        q_i, d_out_i, delta_i, normaliser_i = (_block(x, i) for x in (q, d_out, delta, normaliser))

        def key_block(j, carry):
            d_q, d_k, d_v = carry
            k_j, v_j = _block(k, j), _block(v, j)
            weights = jnp.exp(_scores(q_i, k_j, segments, i, j) - normaliser_i[..., None])
            d_weights = _dot("bkqd,bkmd->bkqm", d_out_i, v_j)
            d_scores = weights * (d_weights - delta_i[..., None])
            d_v = _add_block(d_v, j, _dot("bkqm,bkqd->bkmd", weights, d_out_i))
            d_k = _add_block(d_k, j, _dot("bkqm,bkqd->bkmd", d_scores, q_i))
            return d_q + _dot("bkqm,bkmd->bkqd", d_scores, k_j), d_k, d_v

        d_q = jnp.zeros(q_i.shape, jnp.float32)
        d_q, d_k, d_v = lax.fori_loop(first[i], i + 1, key_block, (d_q, *carry))
        return (d_k, d_v), d_q.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    (d_k, d_v), d_q = lax.scan(query_block, (zeros, zeros), jnp.arange(q.shape[2]))
    return jnp.moveaxis(d_q, 0, 2), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _first_key_block(segments):
    """[n]: the first block, over all rows, that holds a segment of query block i."""
    batch, blocks, block = segments.shape
    flat = segments.reshape(batch, -1)
    index = jnp.arange(blocks * block)
    changes = jnp.concatenate([jnp.ones((batch, 1), bool), flat[:, 1:] != flat[:, :-1]], axis=1)
    start = lax.cummax(jnp.where(changes, index, 0), axis=1)
    return start.reshape(batch, blocks, block)[:, :, 0].min(0) // block


def _block(x, i):
    """Block i of [B, KV, n, ...]."""
    return lax.dynamic_index_in_dim(x, i, axis=2, keepdims=False)


def _add_block(x, i, value):
    return lax.dynamic_update_index_in_dim(x, _block(x, i) + value, i, axis=2)


def _dot(spec: str, a, b):
    """Products in the inputs' precision (the lower one), sums in float32."""
    dtype = b.dtype
    return jnp.einsum(spec, a.astype(dtype), b, preferred_element_type=jnp.float32)


def _scores(q_i, k_j, segments, i, j):
    """Masked scores [B, KV, block * G, block] of query block i on key block j, float32."""
    block = segments.shape[-1]
    own, other = segments[:, i], segments[:, j]
    order = i * block + jnp.arange(block)[:, None] >= j * block + jnp.arange(block)
    mask = order & (own[:, :, None] == other[:, None, :])
    mask = jnp.repeat(mask, q_i.shape[2] // block, axis=1)
    return jnp.where(mask[:, None], _dot("bkqd,bkmd->bkqm", q_i, k_j), MASKED)
