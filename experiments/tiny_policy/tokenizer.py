"""A small byte-level BPE tokenizer with Qwen's chat tokens and a ChatML template.

Merges may run over several words of a line, so that the fixed wording of prompts costs a small
policy few tokens. What a recipe sets apart (`Recipe.alone`) stands alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"

# Added tokens and whether they are special, in Qwen's order.
ADDED_TOKENS = {
    END_OF_TEXT: True,
    "<|im_start|>": True,
    END_OF_TURN: True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
}

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if loop.first and tools %}
{{- '\\n\\n# Tools\\n\\nYou can call these functions:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + tool | tojson }}
{%- endfor %}
{{- '\\n</tools>\\n\\nTo call one, write its name and arguments as JSON:\\n<tool_call>\\n' }}
{{- '{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_ROLES = ("system", "user", "assistant", "tool") * 100


def train_tokenizer(texts: Iterable[str], vocab_size: int, alone: str) -> PreTrainedTokenizerFast:
    """Learns merges from `texts` and adds the chat tokens; `vocab_size` counts all of them.

    Args:
      alone: regular expression of texts that merges do not cross. It must match "<", so that none
        spells an added token such as <think>.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(alone), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=200,
        show_progress=False,
    )
    tokenizer.train_from_iterator((*_ROLES, *texts), trainer)
    tokenizer.add_tokens(
        [
            AddedToken(text, special=special, normalized=False)
            for text, special in ADDED_TOKENS.items()
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
