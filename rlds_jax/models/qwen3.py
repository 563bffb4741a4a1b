"""The decoder of Qwen3, Qwen2.5 and Llama as pure functions over a tree of parameters.

`parameter_table` says everything about every parameter (Hugging Face name and orientation, shape,
logical axes, initialiser); initialising, loading, saving and sharding all read it. Layers are
stacked on a leading axis and run by one `lax.scan`, so compile time does not grow with depth.

Let B be rows, L the row length, D hidden, H / KV query and key-value heads, hd head_dim, F the MLP
width, V the vocabulary. RMSNorm, rotary, softmax and logits-to-logprob are computed in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import lax
from jax.sharding import Mesh

from rlds_jax.models import attention as attention_lib
from rlds_jax.models.config import ModelConfig
from rlds_jax.models.partition import constrain

Params = dict[str, Any]
Remat = Literal["none", "dots", "full"]

_NORMAL = jax.nn.initializers.normal(0.02)
_ONES = jax.nn.initializers.ones
_ZEROS = jax.nn.initializers.zeros


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of the model.

    Attributes:
      hf_name: tensor name in a checkpoint; "{layer}" stands for the index on the stacked axis.
      shape: ours, the stacked layer axis included.
      axes: logical axis names, one per dimension (partition.py maps them to mesh axes).
      init: initialiser, called with (key, shape, dtype).
      hf_dims: for each dimension of the checkpoint's tensor, those of ours (without the layer axis)
        that it merges, the slowest first.
    """

    hf_name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Callable[..., jax.Array]
    hf_dims: tuple[tuple[int, ...], ...]

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layers"

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Ours, of one layer."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def hf_order(self) -> tuple[int, ...]:
        """Our dimensions (without the layer axis) in the order of the checkpoint."""
        return tuple(axis for merged in self.hf_dims for axis in merged)

    @property
    def hf_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.own_shape[axis] for axis in merged) for merged in self.hf_dims)

    @property
    def hf_names(self) -> list[str]:
        """Tensor names in a checkpoint, by layer."""
        count = self.shape[0] if self.stacked else 1
        return [self.hf_name.format(layer=layer) for layer in range(count)]


def parameter_table(config: ModelConfig) -> dict[str, Parameter]:
    """Every parameter by its path in the tree ("embed", "layers/q", ...)."""
    sizes = {
        "layers": config.num_layers,
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "mlp": config.intermediate_size,
    }

    def parameter(hf_name: str, axes: str, hf_axes: str, init=_NORMAL) -> Parameter:
        """`hf_axes` lists the checkpoint's dimensions in order; "a*b" is a merged one."""
        names = tuple(axes.split())
        own = names[1:] if names[0] == "layers" else names
        hf_dims = [tuple(map(own.index, merged.split("*"))) for merged in hf_axes.split()]
        shape = tuple(sizes[name] for name in names)
        return Parameter(hf_name, shape, names, init, tuple(hf_dims))

    layer = "model.layers.{layer}."
    attn = layer + "self_attn."
    table = {
        "embed": parameter("model.embed_tokens.weight", "vocab embed", "vocab embed"),
        "final_norm": parameter("model.norm.weight", "embed", "embed", _ONES),
        "layers/input_norm": parameter(
            layer + "input_layernorm.weight", "layers embed", "embed", _ONES
        ),
        "layers/post_norm": parameter(
            layer + "post_attention_layernorm.weight", "layers embed", "embed", _ONES
        ),
        "layers/q": parameter(
            attn + "q_proj.weight", "layers embed heads head_dim", "heads*head_dim embed"
        ),
        "layers/k": parameter(
            attn + "k_proj.weight", "layers embed kv_heads head_dim", "kv_heads*head_dim embed"
        ),
        "layers/v": parameter(
            attn + "v_proj.weight", "layers embed kv_heads head_dim", "kv_heads*head_dim embed"
        ),
        "layers/o": parameter(
            attn + "o_proj.weight", "layers heads head_dim embed", "embed heads*head_dim"
        ),
        "layers/gate": parameter(layer + "mlp.gate_proj.weight", "layers embed mlp", "mlp embed"),
        "layers/up": parameter(layer + "mlp.up_proj.weight", "layers embed mlp", "mlp embed"),
        "layers/down": parameter(layer + "mlp.down_proj.weight", "layers mlp embed", "embed mlp"),
    }
    if not config.tie_embeddings:
        table["lm_head"] = parameter("lm_head.weight", "vocab embed", "vocab embed")
    if config.qk_norm:
        for name in ("q", "k"):
            table[f"layers/{name}_norm"] = parameter(
                attn + f"{name}_norm.weight", "layers head_dim", "head_dim", _ONES
            )
    if config.attention_bias:
        for name, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")):
            table[f"layers/{name}_bias"] = parameter(
                attn + f"{name}_proj.bias", f"layers {heads} head_dim", f"{heads}*head_dim", _ZEROS
            )
    return table


def init_params(config: ModelConfig, key: jax.Array, dtype=jnp.float32) -> Params:
    """Random parameters, by the table's initialisers."""
    table = parameter_table(config)
    keys = jax.random.split(key, len(table))
    flat = {
        path: parameter.init(k, parameter.shape, dtype)
        for k, (path, parameter) in zip(keys, sorted(table.items()), strict=True)
    }
    return traverse_util.unflatten_dict(flat, sep="/")


def rms_norm(x, scale, eps: float):
    """x / rms(x) * scale over the last axis, in float32; returns x's dtype."""
    x32 = x.astype(jnp.float32)
    normalised = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normalised * scale.astype(jnp.float32)).astype(x.dtype)


def rotary_angles(positions, head_dim: int, theta: float):
    """cos and sin [..., head_dim / 2] float32 of positions [...]; theta is the base."""
    half = head_dim // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x, cos, sin):
    """Rotates the two halves of each head (as in the checkpoints), in float32.

    Args:
      x: [..., heads, hd] queries or keys.
      cos, sin: [..., hd / 2] of their positions.

    Returns:
      [..., heads, hd] in x's dtype.
    """
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def rotary(x, positions, theta: float):
    """Rotary position embedding of x [..., heads, hd] at positions [...]."""
    return rotate(x, *rotary_angles(positions, x.shape[-1], theta))


def qkv(layer: Params, config: ModelConfig, x, positions):
    """Rotated queries [..., H, hd] and keys [..., KV, hd], and values, of normalised x [..., D]."""
    q = jnp.einsum("...d,dhk->...hk", x, layer["q"])
    k = jnp.einsum("...d,dhk->...hk", x, layer["k"])
    v = jnp.einsum("...d,dhk->...hk", x, layer["v"])
    angles = rotary_angles(positions, config.head_dim, config.rope_theta)
    return finish_qkv(layer, config, q, k, v, angles)


def finish_qkv(layer: Params, config: ModelConfig, q, k, v, angles, norm=rms_norm):
    """Bias, head norm and rotary embedding (angles: cos, sin) of the three projections."""
    if config.attention_bias:
        q, k, v = q + layer["q_bias"], k + layer["k_bias"], v + layer["v_bias"]
    if config.qk_norm:
        q = norm(q, layer["q_norm"], config.rms_norm_eps)
        k = norm(k, layer["k_norm"], config.rms_norm_eps)
    return rotate(q, *angles), rotate(k, *angles), v


def attention_output(layer: Params, attn):
    """Projects attended heads [..., H, hd] to [..., D]."""
    return jnp.einsum("...hk,hkd->...d", attn, layer["o"])


def mlp(layer: Params, x):
    """The gated MLP (SwiGLU) of normalised x [..., D]."""
    return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def embed_tokens(params: Params, tokens, dtype):
    """[...] ids to [..., D]."""
    return params["embed"][tokens].astype(dtype)


def unembedding(params: Params):
    """[V, D]: the head, or the embedding where they are tied."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens,
    positions,
    segment_ids,
    *,
    compute_dtype=jnp.float32,
    remat: Remat = "none",
    attention: attention_lib.Choice = "blockwise",
    mesh: Mesh | None = None,
):
    """The decoder over packed rows.

    Args:
      tokens, positions, segment_ids: [B, L] int32; segment 0 is padding, and a token attends to
        earlier tokens of its own segment only.
      compute_dtype: of activations and matmuls.
      remat: what the backward pass recomputes: nothing, all but matmul outputs, or whole layers.
      attention: implementation, see models/attention.py.
      mesh: that the arrays are spread over; None on a single device.

    Returns:
      [B, L, D] after the final norm, in compute_dtype.
    """

    # Tokens are one axis outside attention: with two, the weight gradients are transposed copies.
    rows, length = tokens.shape
    positions = positions.reshape(-1)

    def block(x, layer):
        layer = jax.tree.map(lambda p: p.astype(compute_dtype), layer)
        normalised = rms_norm(x, layer["input_norm"], config.rms_norm_eps)
        q, k, v = (
            heads.reshape(rows, length, *heads.shape[1:])
            for heads in qkv(layer, config, normalised, positions)
        )
        attended = attention_lib.attend(q, k, v, segment_ids, implementation=attention, mesh=mesh)
        attended = attended.reshape(rows * length, *attended.shape[2:])
        x = constrain(x + attention_output(layer, attended), mesh, "tokens", "hidden")
        x = x + mlp(layer, rms_norm(x, layer["post_norm"], config.rms_norm_eps))
        return constrain(x, mesh, "tokens", "hidden"), None

    x = embed_tokens(params, tokens.reshape(-1), compute_dtype)
    x = constrain(x, mesh, "tokens", "hidden")
    x, _ = lax.scan(_remat(block, remat), x, params["layers"])
    return rms_norm(x, params["final_norm"], config.rms_norm_eps).reshape(rows, length, -1)


def _remat(block, policy: Remat):
    if policy == "none":
        return block
    if policy == "dots":
        saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(block, policy=saved, prevent_cse=False)
    if policy == "full":
        return jax.checkpoint(block, prevent_cse=False)
    raise ValueError(f"remat {policy!r} is unknown; use none, dots or full")


@functools.partial(jax.jit, static_argnames="chunk_size")
def token_logprobs(hidden, unembed, targets, temperature, *, chunk_size: int = 1024):
    """`row_logprobs` of tokens [N] that are all active."""
    logprobs, entropy = row_logprobs(
        hidden[None],
        unembed,
        targets[None],
        temperature[None],
        jnp.ones((1, hidden.shape[0]), bool),
        chunk_size=chunk_size,
    )
    return logprobs[0], entropy[0]


def row_logprobs(
    hidden,
    unembed,
    targets,
    temperature,
    active,
    *,
    chunk_size: int = 1024,
    mesh: Mesh | None = None,
):
    """Log-probability of each target, and the entropy, under softmax(hidden @ unembed.T / temp).

    Works through the active tokens in chunks, forward and backward, so that the largest array is
    [chunk_size, V] and tokens without a loss cost nothing: each row's active tokens are moved to
    its front, and a chunk takes the next few positions of every row. The backward pass recomputes
    the logits. Differentiable in hidden and unembed.

    Args:
      hidden: [B, L, D].
      unembed: [V, D].
      targets: [B, L] int32.
      temperature: [B, L] float32, positive where active.
      active: [B, L] bool.
      chunk_size: tokens whose logits exist at once, over all devices.
      mesh: that the arrays are spread over; None on a single device.

    Returns:
      logprobs, entropy: [B, L] float32, 0 where not active.
    """
    rows, length = targets.shape
    width = min(max(chunk_size // rows, 1), length)
    chunks = -(-length // width)
    order = jnp.argsort(~active, axis=1, stable=True)
    used = -(-jnp.max(jnp.sum(active, axis=1)) // width)

    def split(x):
        """[B, L, ...] to [chunks, B, width, ...], active tokens first."""
        x = jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), axis=1)
        x = jnp.pad(x, [(0, 0), (0, chunks * width - length)] + [(0, 0)] * (x.ndim - 2))
        x = jnp.moveaxis(x.reshape(rows, chunks, width, *x.shape[2:]), 1, 0)
        return constrain(x, mesh, None, "rows", *[None] * (x.ndim - 2))

    def join(x):
        x = jnp.moveaxis(x, 0, 1).reshape(rows, -1)
        return jnp.where(active, jnp.take_along_axis(x, jnp.argsort(order, axis=1), axis=1), 0.0)

    inverse = split(1 / jnp.where(active, temperature, 1.0).astype(jnp.float32))
    unembed = constrain(unembed, mesh, "head_vocab", "hidden")
    logprobs, entropy = _chunk_logprobs(split(hidden), unembed, split(targets), inverse, used, mesh)
    return join(logprobs), join(entropy)


def _scaled_logits(hidden, unembed, inverse_temperature, mesh):
    """float32 logits [B * width, V] of one chunk."""
    hidden = constrain(hidden, mesh, "head_rows", None, "hidden").reshape(-1, hidden.shape[-1])
    logits = jnp.einsum(
        "nd,vd->nv", hidden, unembed.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    logits = constrain(logits, mesh, "head_rows", "head_vocab")
    return logits * inverse_temperature.reshape(-1, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _chunk_logprobs(hidden, unembed, targets, inverse_temperature, used, mesh):
    """`row_logprobs` over the first `used` of [chunks, B, width, ...]; 0 in the others."""
    return _chunk_forward(hidden, unembed, targets, inverse_temperature, used, mesh)[0]


def _chunk_forward(hidden, unembed, targets, inverse_temperature, used, mesh):
    def chunk(i, outputs):
        logits = _scaled_logits(hidden[i], unembed, inverse_temperature[i], mesh)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        logp = logits - normaliser[:, None]
        chosen = jnp.take_along_axis(logp, targets[i].reshape(-1, 1), axis=-1)[:, 0]
        values = (chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1), normaliser)
        shape = targets.shape[1:]
        return tuple(o.at[i].set(v.reshape(shape)) for o, v in zip(outputs, values, strict=True))

    zeros = jnp.zeros(targets.shape, jnp.float32)
    logprobs, entropy, normaliser = lax.fori_loop(0, used, chunk, (zeros, zeros, zeros))
    saved = (hidden, unembed, targets, inverse_temperature, used, entropy, normaliser)
    return (logprobs, entropy), saved


def _chunk_backward(mesh, saved, cotangents):
    """d logp / d z = onehot - p and d H / d z = -p (log p + H), for scaled logits z."""
    hidden, unembed, targets, inverse_temperature, used, entropy, normaliser = saved

    def chunk(i, gradients):
        d_hidden, d_unembed = gradients
        target, inverse, chunk_entropy, log_z, d_logprob, d_entropy = (
            x[i].reshape(-1)
            for x in (targets, inverse_temperature, entropy, normaliser, *cotangents)
        )
        logp = _scaled_logits(hidden[i], unembed, inverse, mesh) - log_z[:, None]
        slope = d_logprob + d_entropy * chunk_entropy
        d_logits = -jnp.exp(logp) * (slope[:, None] + d_entropy[:, None] * logp)
        d_logits = d_logits.at[jnp.arange(len(target)), target].add(d_logprob)
        d_logits = (d_logits * inverse[:, None]).astype(hidden.dtype)
        d_rows = d_logits @ unembed.astype(hidden.dtype)
        flat = hidden[i].reshape(-1, hidden.shape[-1])
        d_unembed += jnp.einsum("nv,nd->vd", d_logits, flat, preferred_element_type=jnp.float32)
        d_rows = constrain(d_rows.reshape(hidden.shape[1:]), mesh, "rows", None, "hidden")
        return d_hidden.at[i].set(d_rows), constrain(d_unembed, mesh, "head_vocab", "hidden")

    zeros = (jnp.zeros_like(hidden), jnp.zeros(unembed.shape, jnp.float32))
    d_hidden, d_unembed = lax.fori_loop(0, used, chunk, zeros)
    return d_hidden, d_unembed.astype(unembed.dtype), None, None, None


_chunk_logprobs.defvjp(_chunk_forward, _chunk_backward)
