"""Architecture hyper-parameters, to and from a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Qwen3 / Qwen2.5 / Llama shape.

    Attributes:
      qk_norm: RMSNorm on query and key heads (Qwen3).
      attention_bias: bias on the q, k, v projections (Qwen2.5).
      tie_embeddings: the unembedding is the embedding.
      max_positions: longest sequence the checkpoint claims to support.

    Raises:
      ValueError: naming the field that does not hold.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    tie_embeddings: bool
    rms_norm_eps: float = 1e-6
    qk_norm: bool = True
    attention_bias: bool = False
    max_positions: int = 32768

    def __post_init__(self):
        for name in _SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"model.{name} is {size!r}; it must be a positive integer")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim is {self.head_dim}; rotary positions need it even")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Reads the fields of a transformers config.json.

        Raises:
          ValueError: the model type is not supported, or a field is missing or of a wrong kind.
        """
        model_type = hf.get("model_type")
        if model_type not in ("qwen3", "qwen2", "llama"):
            raise ValueError(
                f"config.json: model_type {model_type!r} is not supported; "
                "use qwen3, qwen2 or llama"
            )
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ValueError(f"config.json: rope_type {rope_type!r} is not supported; only default")
        theta = hf.get("rope_theta", rope.get("rope_theta"))
        if theta is None:
            raise ValueError("config.json: field 'rope_theta' is missing")
        if hf.get("use_sliding_window"):
            raise ValueError("config.json: use_sliding_window is not supported; set it to false")
        for field in ("attention_bias", "mlp_bias"):
            if hf.get(field) and model_type != "qwen2":
                raise ValueError(f"config.json: {field} is not supported for {model_type}")
        if hf.get("hidden_act", "silu") != "silu":
            raise ValueError(
                f"config.json: hidden_act {hf['hidden_act']!r} is not supported; only silu"
            )
        try:
            heads = hf["num_attention_heads"]
            return cls(
                vocab_size=hf["vocab_size"],
                hidden_size=hf["hidden_size"],
                intermediate_size=hf["intermediate_size"],
                num_layers=hf["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=hf.get("num_key_value_heads", heads),
                head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
                rope_theta=float(theta),
                tie_embeddings=hf.get("tie_word_embeddings", False),
                rms_norm_eps=hf["rms_norm_eps"],
                qk_norm=model_type == "qwen3",
                attention_bias=model_type == "qwen2",
                max_positions=hf["max_position_embeddings"],
            )
        except KeyError as error:
            raise ValueError(f"config.json: field {error} is missing") from error
        except (TypeError, ZeroDivisionError) as error:
            raise ValueError(f"config.json: a field is of a wrong kind: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The fields of a transformers config.json; the inverse of `from_hf`.

        Raises:
          ValueError: QK norm together with attention bias, which no supported architecture has.
        """
        if self.qk_norm and self.attention_bias:
            raise ValueError(
                "qk_norm and attention_bias together have no Hugging Face architecture"
            )
        model_type = "qwen3" if self.qk_norm else "qwen2" if self.attention_bias else "llama"
        architecture = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[model_type]
        return {
            "architectures": [f"{architecture}ForCausalLM"],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": False,
            "max_position_embeddings": self.max_positions,
        }


QWEN3_4B = ModelConfig(  # Qwen3-4B-Instruct-2507
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=5e6,
    tie_embeddings=True,
    max_positions=262144,
)
