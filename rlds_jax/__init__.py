"""Reinforcement Learning with Decomposed Subtasks (RLDS) for language-model agents, in JAX."""
