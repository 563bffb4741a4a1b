"""Tokenizers and chat templates shared by the rollout tests."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>")
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CORPUS = ["the agent moves on the grid and falls into the hole", "user assistant system tool"] * 4

CHATML = """
{%- if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] -%}
{%- else %}{% set first = none %}{% set rest = messages %}{% endif -%}
{%- if tools %}
{{- '<|im_start|>system\n' }}{% if first is not none %}{{ first + '\n\n' }}{% endif %}
{{- 'Tools:' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\nCall one as <tool_call>{...}</tool_call>.<|im_end|>\n' }}
{%- elif first is not none %}{{- '<|im_start|>system\n' + first + '<|im_end|>\n' }}{% endif -%}
{%- for m in rest %}
{%- if m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
""".strip()


def build_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few hundred entries with Qwen's kinds of added tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in NOT_SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()
