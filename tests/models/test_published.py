"""Published configurations: the table has their tensors, by transformers and by their own count."""

import math

import pytest
import torch
import transformers

from rlds_jax.models.config import QWEN3_4B, ModelConfig
from rlds_jax.models.qwen3 import parameter_table

COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "use_sliding_window": False,
    "rope_scaling": None,
    "hidden_act": "silu",
}
QWEN3_2507 = QWEN3 | {"rope_theta": 5e6, "max_position_embeddings": 262144}
QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "hidden_act": "silu",
}
LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "hidden_act": "silu",
}
SMOLLM2 = LLAMA | {"vocab_size": 49152, "rope_theta": 1e5, "max_position_embeddings": 8192}
LLAMA3 = LLAMA | {"vocab_size": 128256, "rope_theta": 5e5, "max_position_embeddings": 8192}

# A tied head is not counted twice.
MODELS = {
    "Qwen3-0.6B": (QWEN3, (1024, 3072, 28, 16, 8, True), 596_049_920),
    "Qwen3-1.7B": (QWEN3, (2048, 6144, 28, 16, 8, True), 1_720_574_976),
    "Qwen3-4B": (QWEN3, (2560, 9728, 36, 32, 8, True), 4_022_468_096),
    "Qwen3-4B-Instruct-2507": (QWEN3_2507, (2560, 9728, 36, 32, 8, True), 4_022_468_096),
    "Qwen3-8B": (QWEN3, (4096, 12288, 36, 32, 8, False), 8_190_735_360),
    "Qwen3-14B": (QWEN3, (5120, 17408, 40, 40, 8, False), 14_768_307_200),
    "Qwen3-32B": (QWEN3, (5120, 25600, 64, 64, 8, False), 32_762_123_264),
    "Qwen2.5-0.5B": (QWEN2, (896, 4864, 24, 14, 2, True), 494_032_768),
    "Qwen2.5-1.5B": (QWEN2, (1536, 8960, 28, 12, 2, True), 1_543_714_304),
    "Qwen2.5-3B": (QWEN2, (2048, 11008, 36, 16, 2, True), 3_085_938_688),
    "Qwen2.5-7B": (
        QWEN2 | {"vocab_size": 152064},
        (3584, 18944, 28, 28, 4, False),
        7_615_616_512,
    ),
    "SmolLM2-135M": (SMOLLM2, (576, 1536, 30, 9, 3, True), 134_515_008),
    "SmolLM2-1.7B": (
        SMOLLM2 | {"rope_theta": 130000},
        (2048, 8192, 24, 32, 32, True),
        1_711_376_384,
    ),
    "Llama-3-8B": (LLAMA3, (4096, 14336, 32, 32, 8, False), 8_030_261_248),
}


@pytest.mark.parametrize(("common", "sizes", "count"), MODELS.values(), ids=MODELS)
def test_tensors_are_those_of_transformers_and_their_count_is_known(common, sizes, count):
    hf = common | dict(zip(COLUMNS, sizes, strict=True))
    table = parameter_table(ModelConfig.from_hf(hf))
    ours = {name: p.hf_shape for p in table.values() for name in p.hf_names}
    config = transformers.AutoConfig.for_model(**hf)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert ours == theirs
    assert sum(math.prod(p.shape) for p in table.values()) == count


@pytest.mark.parametrize(("common", "sizes", "count"), MODELS.values(), ids=MODELS)
def test_a_config_goes_there_and_back(common, sizes, count):
    del count
    config = ModelConfig.from_hf(common | dict(zip(COLUMNS, sizes, strict=True)))
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert config.to_hf()["model_type"] == common["model_type"]


def test_the_model_of_the_paper_is_its_published_configuration():
    common, sizes, _ = MODELS["Qwen3-4B-Instruct-2507"]
    assert ModelConfig.from_hf(common | dict(zip(COLUMNS, sizes, strict=True))) == QWEN3_4B
