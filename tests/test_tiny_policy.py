"""The bundled tiny policies: they load, are small, and were trained for today's formats."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.tiny_policy.manifest import MANIFEST, formats
from experiments.tiny_policy.recipe import TASKS, bundled, load
from experiments.tiny_policy.tokenizer import ADDED_TOKENS
from rlds_jax.models import weights
from rlds_jax.play import make_task
from rlds_jax.rollouts.chat import ChatFormat


@pytest.fixture(scope="module", params=TASKS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def directory(name):
    return bundled(load(name))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


def test_a_bundled_policy_was_trained_for_these_formats(name, directory):
    recipe = load(name)
    trained = json.loads((directory / MANIFEST).read_text())["formats"]
    now = formats(recipe, make_task(recipe.config().task), directory)
    changed = [part for part in now if now[part] != trained.get(part)]
    rebuild = f"python -m experiments.tiny_policy.build --task={name}"
    assert not changed, f"{changed} changed since the tiny policy was trained; rebuild: {rebuild}"


def test_a_bundled_policy_is_small_and_a_hugging_face_directory(directory, tokenizer):
    assert sum(path.stat().st_size for path in directory.iterdir()) < 10_000_000
    config, params = weights.load(directory)
    assert config.head_dim >= 32
    assert config.tie_embeddings
    assert 0.5e6 < sum(p.size for p in _leaves(params)) < 5e6
    assert len(tokenizer) <= config.vocab_size
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert sum(p.numel() for p in model.parameters()) == sum(p.size for p in _leaves(params))


def _leaves(tree):
    return [x for v in tree.values() for x in (_leaves(v) if isinstance(v, dict) else [v])]


# The tokenizer


def test_the_tokenizer_keeps_any_text(tokenizer):
    texts = ["A D C\nD B D", "naïve ∑ 中文 <think>x</think>", " <action>Up</action>\n\n  Down", ""]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_tokens_are_single(tokenizer):
    for text in ADDED_TOKENS:
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1


def test_the_chat_template_is_append_only_with_users_tools_and_advice(tokenizer):
    chat = ChatFormat(tokenizer, ("user", "tool"))
    messages = [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "<think>a</think>b"},
        {"role": "system", "content": "advice"},
        {"role": "user", "content": "second"},
    ]
    answer = chat.encode_assistant("<think>a</think>b") + [chat.end_of_turn]
    appended = chat.prompt(messages[:2]) + answer + chat.suffix(answer, "second", "user", "advice")
    assert appended == chat.prompt(messages)


def test_the_template_shows_tools_in_the_system_message(tokenizer):
    tool = {"type": "function", "function": {"name": "search", "parameters": {}}}
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "tool", "content": "found"}],
        tools=[tool],
        tokenize=False,
    )
    assert text.index('"name": "search"') < text.index("<|im_end|>")
    assert "<tool_response>\nfound\n</tool_response>" in text
