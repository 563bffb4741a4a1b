"""Hugging Face directories in and out."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlds_jax.models import qwen3, safetensors_dir, weights
from rlds_jax.models.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e6,
    tie_embeddings=True,
)


@pytest.fixture
def params():
    return qwen3.init_params(CONFIG, jax.random.key(0))


@pytest.fixture
def directory(params, tmp_path):
    weights.save(params, CONFIG, tmp_path, jnp.float32)
    return tmp_path


def assert_bitwise(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def edit(directory, change):
    path = directory / safetensors_dir.SINGLE
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("shard_bytes", [2**30, 4000])
def test_round_trip_is_bitwise(params, tmp_path, shard_bytes):
    weights.save(params, CONFIG, tmp_path, jnp.float32, shard_bytes=shard_bytes)
    assert (tmp_path / safetensors_dir.INDEX).exists() == (shard_bytes == 4000)
    config, loaded = weights.load(tmp_path)
    assert config == CONFIG
    assert_bitwise(loaded, params)


def test_bfloat16_round_trip_is_bitwise(params, tmp_path):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    weights.save(low, CONFIG, tmp_path)
    _, loaded = weights.load(tmp_path, jnp.bfloat16)
    assert_bitwise(loaded, low)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_saving_again_leaves_no_stale_shards(params, tmp_path):
    weights.save(params, CONFIG, tmp_path, shard_bytes=4000)
    weights.save(params, CONFIG, tmp_path)
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == [safetensors_dir.SINGLE]


def test_companions_and_unknown_config_fields_come_from_the_source(params, directory, tmp_path):
    (directory / "tokenizer.json").write_text("{}")
    (directory / "notes.txt").write_text("not copied")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 3}))
    out = tmp_path / "out"
    weights.save(params, CONFIG, out, source=directory)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not (out / "notes.txt").exists()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 3


def test_faulty_tensors_are_all_named_before_anything_is_allocated(directory, monkeypatch):
    monkeypatch.setattr(weights, "_stream", lambda *_: pytest.fail("loading began"))

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.extra.weight"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.zeros(25, np.float32)

    edit(directory, change)
    with pytest.raises(ValueError, match="does not match its config") as error:
        weights.load(directory)
    message = str(error.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.0.extra.weight" in message
    assert "model.norm.weight is (25,), config.json says (24,)" in message


def test_a_tied_checkpoint_may_repeat_its_head(params, directory):
    edit(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert_bitwise(weights.load(directory)[1], params)


def test_missing_files_are_named(directory):
    (directory / safetensors_dir.SINGLE).unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        weights.load(directory)
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        weights.load(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}, "rope_type 'yarn'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": "24"}, "hidden_size is '24'"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_attention_heads": 0, "head_dim": None}, "wrong kind"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
    ],
)
def test_unsupported_architectures_are_refused(directory, change, message):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        weights.load_config(directory)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"\xff"),
        ("config.json", b"[]"),
        (safetensors_dir.SINGLE, b""),
        (safetensors_dir.SINGLE, b"\x08" + bytes(7) + b"{}      rest"),
        (safetensors_dir.INDEX, b"{}"),
        (safetensors_dir.INDEX, b"not json"),
        (safetensors_dir.INDEX, b'{"weight_map": ["a"]}'),
    ],
)
def test_a_damaged_file_is_named(directory, name, content):
    (directory / name).write_bytes(content)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        weights.load(directory)


def test_a_truncated_file_is_named(directory):
    path = directory / safetensors_dir.SINGLE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        weights.load(directory)


def test_a_tensor_that_its_shard_lacks_is_missing(directory):
    names = [*load_file(directory / safetensors_dir.SINGLE)]
    edit(directory, lambda tensors: tensors.pop(names[0]))
    index = {"weight_map": dict.fromkeys(names, safetensors_dir.SINGLE)}
    (directory / safetensors_dir.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"missing: {names[0]}"):
        weights.load(directory)


@pytest.mark.parametrize("field", ["vocab_size", "rms_norm_eps", "max_position_embeddings"])
def test_a_missing_field_is_named(field):
    fields = CONFIG.to_hf()
    del fields[field]
    with pytest.raises(ValueError, match=field):
        ModelConfig.from_hf(fields)


def test_a_missing_rope_theta_is_named():
    fields = CONFIG.to_hf()
    del fields["rope_theta"], fields["rope_parameters"]
    with pytest.raises(ValueError, match="rope_theta"):
        ModelConfig.from_hf(fields)


def test_norm_and_bias_together_cannot_be_saved(params, tmp_path):
    with pytest.raises(ValueError, match="qk_norm and attention_bias"):
        ModelConfig(**{**vars(CONFIG), "attention_bias": True}).to_hf()
