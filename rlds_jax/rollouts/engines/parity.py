"""The parity gate: sampler and trainer must give the same tokens the same log-probabilities.

A stale prefix cache, a stale head, a wrong orientation, another rotary base, another temperature:
each moves the sampler away from the trainer without any error. The probe would show it: sequences
that the sampler wrote itself in several turns, on prompts longer than a block of its cache and
repeated from gate to gate. DESIGN "Engines".
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from rlds_jax.models import qwen3
from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.engines.base import Engine

PROBES, TURNS, SAMPLED, OBSERVED, PROMPT = 4, 2, 24, 40, 288
TEMPERATURE = 0.7

# Statistic of |sampler - trainer| over the sampled tokens, and the most it may be.
THRESHOLDS: dict[str, tuple[Literal["max", "mean"], float]] = {
    "float32": ("max", 1e-3),
    "bfloat16": ("mean", 0.05),
}


class ParityError(RuntimeError):
    """Sampler and trainer disagree; the message says by how much, and where it begins."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """A sequence that the sampler wrote in turns.

    Attributes:
      tokens: [T] int32, prompt and observations included.
      sampled: [T] bool.
      logprobs: [T] float32 of the sampler, 0 where not sampled.
    """

    tokens: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray


@dataclasses.dataclass(frozen=True)
class ParityGate:
    """Compares an engine with the trainer's own forward pass.

    Attributes:
      model: architecture.
      dtype: of the sampler; the coarser of both decides the threshold.
      compute_dtype: of the trainer's forward pass.
    """

    model: ModelConfig
    dtype: str
    compute_dtype: str

    def __call__(self, engine: Engine, params: qwen3.Params) -> dict[str, float]:
        """Metrics of a comparison that holds.

        Raises:
          ParityError: it does not.
        """
        probes = asyncio.run(self._sample(engine))
        theirs = np.stack([probe.logprobs for probe in probes])
        sampled = np.stack([probe.sampled for probe in probes])
        ours = np.where(sampled, self._trainer(params, probes), 0.0)
        difference = np.abs(theirs - ours)
        found = {"max": float(difference.max()), "mean": float(difference[sampled].mean())}
        coarse = "bfloat16" if "bfloat16" in (self.dtype, self.compute_dtype) else "float32"
        statistic, limit = THRESHOLDS[coarse]
        if not found[statistic] <= limit:
            raise ParityError(
                f"the sampler's log-probabilities are not the trainer's: {statistic} difference "
                f"{found[statistic]:.2e} over {int(sampled.sum())} tokens, at most {limit:g} is "
                f"allowed in {coarse}; {_where(difference, sampled, theirs, ours, limit)}. The "
                "sampler has other weights, another cache or another model than the trainer; see "
                "docs/sidecar.md"
            )
        return {f"engine/parity_{name}": value for name, value in found.items()}

    async def _sample(self, engine: Engine) -> list[Probe]:
        return await asyncio.gather(*(self._probe(engine, i) for i in range(PROBES)))

    async def _probe(self, engine: Engine, index: int) -> Probe:
        """The same prompt for the same index, every time."""
        random = np.random.default_rng((0, index))
        observations = (TURNS - 1) * OBSERVED
        prompt = min(PROMPT, engine.max_context - TURNS * SAMPLED - observations)
        tokens = random.integers(0, self.model.vocab_size, prompt).tolist()
        sampled, logprobs = [False] * prompt, [0.0] * prompt
        for turn in range(TURNS):
            completion = await engine.generate(
                tokens,
                max_tokens=SAMPLED,
                temperature=TEMPERATURE,
                stop_ids=(),
                seed=index * TURNS + turn,
            )
            tokens = tokens + completion.ids.tolist()
            sampled += [True] * len(completion.ids)
            logprobs += completion.logprobs.tolist()
            if turn < TURNS - 1:
                tokens = tokens + random.integers(0, self.model.vocab_size, OBSERVED).tolist()
                sampled += [False] * OBSERVED
                logprobs += [0.0] * OBSERVED
        return Probe(np.array(tokens, np.int32), np.array(sampled), np.array(logprobs, np.float32))

    def _trainer(self, params: qwen3.Params, probes: Sequence[Probe]) -> np.ndarray:
        """[PROBES, T] log-probability of each token given those before it; 0 for the first."""
        tokens = np.stack([probe.tokens for probe in probes])
        rest = _logprobs(
            params,
            jnp.array(tokens),
            model=self.model,
            dtype=self.compute_dtype,
        )
        return np.pad(np.asarray(rest), ((0, 0), (1, 0)))


@functools.partial(jax.jit, static_argnames=("model", "dtype"))
def _logprobs(params, tokens, *, model: ModelConfig, dtype: str):
    """[B, T - 1] at TEMPERATURE."""
    rows, length = tokens.shape
    hidden = qwen3.hidden_states(
        params,
        model,
        tokens,
        jnp.broadcast_to(jnp.arange(length), (rows, length)),
        jnp.ones((rows, length), jnp.int32),
        compute_dtype=jnp.dtype(dtype),
    )[:, :-1]
    targets = tokens[:, 1:]
    logprobs, _ = qwen3.row_logprobs(
        hidden,
        qwen3.unembedding(params),
        targets,
        jnp.full(targets.shape, TEMPERATURE),
        jnp.ones(targets.shape, bool),
        chunk_size=512,
    )
    return logprobs


def _where(difference, sampled, theirs, ours, limit: float) -> str:
    """The first token of a probe that is off, and the turn it was sampled in."""
    off = np.argwhere(difference > limit)
    row, at = min(off.tolist(), key=lambda place: (place[1], place[0]))
    starts = np.flatnonzero(np.diff(sampled[row].astype(int)) == 1) + 1
    turn = int(np.searchsorted(starts, at, side="right")) - 1
    return (
        f"the first is token {at} of probe {row} (turn {turn}): sampler {theirs[row, at]:.4f}, "
        f"trainer {ours[row, at]:.4f}; {len(off)} tokens are off"
    )
