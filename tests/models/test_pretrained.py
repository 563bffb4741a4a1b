"""Real pretrained weights: SmolLM2-135M-Instruct says the same here as in transformers."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest
import smollm2
import torch
import transformers

from rlds_jax.models import weights
from rlds_jax.rollouts.engines.local import LocalEngine

QUESTIONS = ("What is the capital of France?", "Why is the sky blue? One sentence.")
MAX_TOKENS = 32


def of_transformers(model, prompt, stop):
    """Ids of the greedy continuation and their log-probabilities."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=stop,
            pad_token_id=stop,
        )[0]
        logp = torch.log_softmax(model(out[None]).logits[0], -1)[len(prompt) - 1 : -1]
    ids = out[len(prompt) :]
    return ids.numpy(), logp.gather(1, ids[:, None])[:, 0].numpy()


async def of_ours(engine, prompts, stop):
    requests = [
        engine.generate(p, max_tokens=MAX_TOKENS, temperature=0, stop_ids=[stop], seed=0)
        for p in prompts
    ]
    return await asyncio.gather(*requests)


@pytest.mark.slow
def test_greedy_text_and_logprobs_match_transformers(tmp_path):
    smollm2.write_directory(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chats = ([{"role": "user", "content": question}] for question in QUESTIONS)
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]
    config, params = weights.load(tmp_path, jnp.float32)
    engine = LocalEngine(params, config, max_context=128, num_slots=2)
    try:
        ours = asyncio.run(of_ours(engine, prompts, tokenizer.eos_token_id))
    finally:
        engine.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for prompt, completion in zip(prompts, ours, strict=True):
        ids, logprobs = of_transformers(model, prompt, tokenizer.eos_token_id)
        assert tokenizer.decode(completion.ids) == tokenizer.decode(ids)
        np.testing.assert_array_equal(completion.ids, ids)
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)
    assert "Paris" in tokenizer.decode(ours[0].ids)
