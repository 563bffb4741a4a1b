"""JSON-schema-constrained decoding by llguidance: which tokens may follow, which must."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from llguidance import hf


class Grammar:
    """Compiles JSON schemas against one tokenizer.

    Args:
      tokenizer: a fast Hugging Face tokenizer, or a directory or tokenizer.json path.
      vocab_size: columns of the model's logits.

    Raises:
      FileNotFoundError: there is no tokenizer.json.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        self._vocab_size = vocab_size
        if isinstance(tokenizer, str | Path):
            path = Path(tokenizer)
            path = path / "tokenizer.json" if path.is_dir() else path
            if not path.is_file():
                raise FileNotFoundError(f"{path} does not exist; expected a tokenizer.json")
            self._tokenizer = llguidance.LLTokenizer(path.read_text(), n_vocab=vocab_size)
        else:
            self._tokenizer = hf.from_tokenizer(tokenizer, n_vocab=vocab_size)

    def matcher(self, schema: Mapping[str, Any], stop_ids: Sequence[int]) -> Matcher:
        """A fresh matcher of compact JSON (no optional whitespace) followed by a stop id.

        Raises:
          ValueError: the schema is not supported, or there is no stop id to end with.
        """
        if not stop_ids:
            raise ValueError("json_schema needs a stop id to end the completion with")
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_flexible": False}
        )
        error = llguidance.LLMatcher.validate_grammar(grammar, self._tokenizer)
        if error:
            raise ValueError(f"json_schema is not supported: {error}")
        return Matcher(llguidance.LLMatcher(self._tokenizer, grammar), stop_ids, self._vocab_size)


class Matcher:
    """Where one completion stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, stop_ids: Sequence[int], vocab_size: int):
        self._matcher = matcher
        self._stop_ids = tuple(stop_ids)
        self._words = -(-vocab_size // 32)

    def forced(self) -> list[int]:
        """Tokens that must come next whatever is sampled; consumes them."""
        tokens = list(self._matcher.compute_ff_tokens())
        self._consume(tokens)
        if self._matcher.is_stopped():
            tokens.append(self._stop_ids[0])
        return tokens

    def allowed(self) -> np.ndarray:
        """[ceil(V / 32)] int32 bitmask of the ids that may come next."""
        mask = np.zeros(self._words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        bits = mask.view(np.uint32)
        for stop in self._stop_ids:
            bit = np.uint32(1 << stop % 32)
            bits[stop // 32] &= ~bit
            if self._matcher.is_accepting():
                bits[stop // 32] |= bit
        return mask

    def consume(self, token: int) -> None:
        """Takes a sampled token that `allowed` permitted."""
        if token not in self._stop_ids:
            self._consume([token])

    def _consume(self, tokens: list[int]) -> None:
        if tokens and not self._matcher.consume_tokens(tokens):
            raise RuntimeError(f"llguidance rejected {tokens}: {self._matcher.get_error()}")
