"""Reinforcement Learning with Decomposed Subtasks (RLDS) for language-model agents, in JAX."""

import os

# transformers would say at every import that PyTorch is missing; only its tokenizers are used.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
