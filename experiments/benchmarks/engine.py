"""Rollout throughput of the local engine beside transformers' `generate`.

    python -m experiments.benchmarks.engine [--format=json] [--repeats=2] [--only=requests,demo]

The model has 12.6 M random parameters (6 layers, hidden 384, 6/2 heads of 64, MLP 1024, vocabulary
8192, tied), but for the demo's requests. Both sides load it in float32 and have two threads; the
work is the same: temperature 1, every sampled token with its log-probability, exactly n new tokens
per request.

  requests     256 requests, prompts log-uniform in [32, 256], n log-uniform in [16, 256]
  few          the first 32 of them
  episodes     16 episodes of 5 turns: a 128-token prompt, then 48 sampled and 64 observation
               tokens per turn
  demo         every request of one RLDS step of the demo, judges' included, to the demo's own
               model; all at once, so neither side waits for an environment

transformers runs left-padded batches of as many rows as the engine has slots, each to its longest
n, and gets log-probabilities from `compute_transition_scores`; an episode's turn is one batch of
16 that prefills its whole context again. Tokens count once asked for: padding steps do not.
Compilation and one whole warm-up pass of the engine, and a short generation of transformers, are
not timed; the cache is cold at the start of each timed pass. Sides alternate `repeats` times and
the best pass of each counts. Takes some five minutes on two CPU cores.

The floor is what the machine could do: matrix FLOPs over the rate of a large product, and bytes of
weights (once per step) and cache (once per token) over the read bandwidth, both measured here.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from absl import app, flags
from ml_collections import ConfigDict

from configs import frozenlake
from experiments.benchmarks.small_model import CONFIG
from rlds_jax.models import qwen3, weights
from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.engines.local import LocalEngine
from rlds_jax.trainer import Trainer

FORMAT = flags.DEFINE_enum("format", "table", ["table", "json"], "How to print the result.")
REPEATS = flags.DEFINE_integer("repeats", 2, "Timed passes per side; the best counts.")
ONLY = flags.DEFINE_list("only", ["requests", "few", "episodes", "demo"], "Workloads to run.")
SLOTS = flags.DEFINE_integer("slots", 64, "Slots of the engine, rows of a transformers batch.")

THREADS = 2
MAX_CONTEXT = 768
EPISODES, TURNS, EPISODE_PROMPT, SAMPLED, OBSERVED = 16, 5, 128, 48, 64


class Request(NamedTuple):
    """A prompt, and how many tokens to sample after it."""

    prompt: list[int]
    new: int


class Pass(NamedTuple):
    """One timed pass over a workload."""

    tokens: int
    seconds: float
    metrics: dict[str, float]


def make_requests(count: int) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = np.exp(rng.uniform(np.log(32), np.log(257), count)).astype(int)
    news = np.exp(rng.uniform(np.log(16), np.log(257), count)).astype(int)
    ids = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in prompts]
    return [Request(prompt, int(new)) for prompt, new in zip(ids, news, strict=True)]


def make_observations() -> np.ndarray:
    """[episodes, 1 + turns, tokens]: the prompt's ids, then each turn's observation."""
    shape = (EPISODES, 1 + TURNS, max(EPISODE_PROMPT, OBSERVED))
    return np.random.default_rng(1).integers(0, CONFIG.vocab_size, shape)


class Ours:
    """The local engine."""

    def __init__(self, params: qwen3.Params, config: ModelConfig, max_context: int):
        self._params = params
        self._engine = LocalEngine(params, config, num_slots=SLOTS.value, max_context=max_context)

    async def _sample(self, prompt: list[int], new: int, seed: int) -> list[int]:
        completion = await self._engine.generate(
            prompt, max_tokens=new, temperature=1.0, stop_ids=(), seed=seed
        )
        assert len(completion.ids) == len(completion.logprobs) == new
        return completion.ids.tolist()

    async def _requests(self, requests: list[Request]) -> int:
        await asyncio.gather(*(self._sample(r.prompt, r.new, i) for i, r in enumerate(requests)))
        return sum(request.new for request in requests)

    async def _episode(self, index: int, texts: np.ndarray) -> None:
        context = texts[0, :EPISODE_PROMPT].tolist()
        for turn in range(TURNS):
            context += await self._sample(context, SAMPLED, index * TURNS + turn)
            context += texts[1 + turn, :OBSERVED].tolist()

    async def _episodes(self, texts: np.ndarray) -> int:
        await asyncio.gather(*(self._episode(i, t) for i, t in enumerate(texts)))
        return EPISODES * TURNS * SAMPLED

    def requests(self, requests: list[Request]) -> Pass:
        return self._timed(lambda: self._requests(requests))

    def episodes(self, texts: np.ndarray) -> Pass:
        return self._timed(lambda: self._episodes(texts))

    def _timed(self, work: Callable[[], Any]) -> Pass:
        self._engine.update_weights(self._params, 1)  # empties the cache
        self._engine.metrics()
        start = time.perf_counter()
        tokens = asyncio.run(work())
        return Pass(tokens, time.perf_counter() - start, self._engine.metrics())

    def close(self) -> None:
        self._engine.close()


class Theirs:
    """transformers' generate."""

    def __init__(self, directory: str | Path):
        torch.set_num_threads(THREADS)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        ).eval()
        self._generate([[1, 2, 3]] * 2, 4)

    def _generate(self, prompts: list[list[int]], new: int) -> torch.Tensor:
        """[rows, new] sampled ids, and their log-probabilities (asked for, not returned)."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        output = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        logprobs = self._model.compute_transition_scores(
            output.sequences, output.scores, normalize_logits=True
        )
        assert logprobs.shape == (len(prompts), new)
        return output.sequences[:, longest:]

    @torch.inference_mode()
    def requests(self, requests: list[Request]) -> Pass:
        start = time.perf_counter()
        for first in range(0, len(requests), SLOTS.value):
            batch = requests[first : first + SLOTS.value]
            self._generate([r.prompt for r in batch], max(r.new for r in batch))
        return Pass(sum(r.new for r in requests), time.perf_counter() - start, {})

    @torch.inference_mode()
    def episodes(self, texts: np.ndarray) -> Pass:
        start = time.perf_counter()
        contexts = [text[0, :EPISODE_PROMPT].tolist() for text in texts]
        for turn in range(TURNS):
            sampled = self._generate(contexts, SAMPLED).tolist()
            for context, ids, text in zip(contexts, sampled, texts, strict=True):
                context += ids + text[1 + turn, :OBSERVED].tolist()
        return Pass(EPISODES * TURNS * SAMPLED, time.perf_counter() - start, {})


def machine() -> dict[str, float]:
    """GFLOP/s of a large float32 product and GB/s of a long read."""
    square = jnp.ones((2048, 2048), jnp.float32)
    long = jnp.ones(64 * 2**20, jnp.float32)
    product = jax.jit(lambda a: a @ a)
    total = jax.jit(lambda a: a.reshape(-1, 2**14).sum(axis=1))

    def best(function: Callable[[], Any]) -> float:
        times = []
        for _ in range(6):
            start = time.perf_counter()
            jax.block_until_ready(function())
            times.append(time.perf_counter() - start)
        return min(times[1:])

    return {
        "gflops": 2 * 2048**3 / best(lambda: product(square)) / 1e9,
        "gbytes_s": long.nbytes / best(lambda: total(long)) / 1e9,
    }


def floor_seconds(
    config: ModelConfig, contexts: list[tuple[int, int]], ours: Pass, rates: dict[str, float]
) -> float:
    """Least time of a pass: FLOPs and bytes at the measured rates, whichever takes longer.

    Args:
      contexts: (first, last) context length of every stretch of sampled tokens.
    """
    per_layer = sum(
        int(np.prod(p.shape[1:]))
        for path, p in qwen3.parameter_table(config).items()
        if p.stacked and "norm" not in path
    )
    matrices = config.num_layers * per_layer
    unembed = config.vocab_size * config.hidden_size
    lengths = np.concatenate([np.arange(first, last) for first, last in contexts])
    width = config.num_layers * config.head_dim
    attention = 4 * config.num_heads * width * lengths.sum()
    flops = 2 * (matrices + unembed) * ours.tokens + attention
    flops += 2 * matrices * ours.metrics["engine/prefill_tokens"]
    read = 4 * (matrices + unembed) * ours.metrics["engine/decode_steps"]
    read += 4 * 2 * config.num_kv_heads * width * lengths.sum()
    return max(flops / rates["gflops"], read / rates["gbytes_s"]) / 1e9


def compare(
    config: ModelConfig,
    ours: Callable[[], Pass],
    theirs: Callable[[], Pass],
    contexts: list[tuple[int, int]],
) -> dict[str, float]:
    """Alternates both sides; the best pass of each."""
    ours()
    passes = [(ours(), theirs()) for _ in range(REPEATS.value)]
    best = min((mine for mine, _ in passes), key=lambda p: p.seconds)
    other = min((yours for _, yours in passes), key=lambda p: p.seconds)
    floor = floor_seconds(config, contexts, best, machine())
    metrics = best.metrics
    return {
        "tokens": best.tokens,
        "seconds": best.seconds,
        "tokens_per_s": best.tokens / best.seconds,
        "transformers_tokens_per_s": other.tokens / other.seconds,
        "ratio": other.seconds / best.seconds,
        "floor_share": floor / best.seconds,
        "prefill_tokens": metrics["engine/prefill_tokens"],
        "prefill_us_per_token": 1e6
        * metrics["engine/prefill_s"]
        / metrics["engine/prefill_tokens"],
        "decode_us_per_token": 1e6 * metrics["engine/decode_s"] / best.tokens,
        "decode_ms_per_step": 1e3 * metrics["engine/decode_s"] / metrics["engine/decode_steps"],
        "idle_slots": metrics["engine/idle_slots"],
        "prefix_hit_rate": metrics["engine/prefix_hit_rate"],
        "other_s": best.seconds - metrics["engine/prefill_s"] - metrics["engine/decode_s"],
    }


def demo_requests(config: ConfigDict) -> list[Request]:
    """What one step of `config` asks of its engine."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(config, Path(directory))
        groups, _ = trainer.rollouts(1)
        trainer.close()
    jax.config.update("jax_compilation_cache_dir", None)  # it went with the directory
    requests = []
    for trajectory in (t for group in groups for t in group.trajectories):
        for turn in range(trajectory.retry_from or 0, len(trajectory.turns)):
            sampled = np.flatnonzero(trajectory.turn_ids == turn)
            if len(sampled):
                requests.append(Request(trajectory.tokens[: sampled[0]].tolist(), len(sampled)))
    judged = [judgement for group in groups for judgement in group.judgements]
    return requests + [Request(j.prompt_ids.tolist(), len(j.ids)) for j in judged if len(j.ids)]


def compare_requests(
    config: ModelConfig, ours: Ours, theirs: Theirs, requests: list[Request]
) -> dict[str, float]:
    contexts = [(len(r.prompt), len(r.prompt) + r.new) for r in requests]
    return compare(
        config, lambda: ours.requests(requests), lambda: theirs.requests(requests), contexts
    )


def measure() -> dict[str, dict[str, float]]:
    """Runs the chosen workloads on both sides."""
    results = {}
    params = qwen3.init_params(CONFIG, jax.random.key(0))
    ours = Ours(params, CONFIG, MAX_CONTEXT)
    with tempfile.TemporaryDirectory() as directory:
        weights.save(params, CONFIG, directory, dtype=jnp.float32)
        theirs = Theirs(directory)
    requests, texts = make_requests(256), make_observations()
    for name, chosen in (("requests", requests), ("few", requests[:32])):
        if name in ONLY.value:
            results[name] = compare_requests(CONFIG, ours, theirs, chosen)
    if "episodes" in ONLY.value:
        starts = [EPISODE_PROMPT + turn * (SAMPLED + OBSERVED) for turn in range(TURNS)]
        contexts = [(start, start + SAMPLED) for start in starts] * EPISODES
        results["episodes"] = compare(
            CONFIG, lambda: ours.episodes(texts), lambda: theirs.episodes(texts), contexts
        )
    ours.close()
    if "demo" in ONLY.value:
        config = frozenlake.get_config("tiny")
        model, params = weights.load(config.model.path)
        ours = Ours(params, model, config.engine.max_context)
        chosen = demo_requests(config)
        results["demo"] = compare_requests(model, ours, Theirs(config.model.path), chosen)
        ours.close()
    return results


def table(results: dict[str, dict[str, float]]) -> str:
    columns = (
        ("tokens", "tokens", "7.0f"),
        ("tokens_per_s", "tok/s", "7.0f"),
        ("transformers_tokens_per_s", "theirs", "7.0f"),
        ("ratio", "ratio", "6.2f"),
        ("floor_share", "floor", "6.1%"),
        ("prefill_us_per_token", "prefill us", "10.0f"),
        ("decode_us_per_token", "decode us", "9.0f"),
        ("decode_ms_per_step", "step ms", "8.2f"),
        ("idle_slots", "idle", "6.1%"),
        ("prefix_hit_rate", "hits", "6.1%"),
        ("other_s", "other s", "7.2f"),
    )
    widths = [max(len(title), len(format(0, spec))) for _, title, spec in columns]
    lines = [
        f"{'':<10}"
        + " ".join(f"{title:>{w}}" for (_, title, _), w in zip(columns, widths, strict=True))
    ]
    for name, result in results.items():
        cells = [
            f"{format(result[key], spec):>{w}}"
            for (key, _, spec), w in zip(columns, widths, strict=True)
        ]
        lines.append(f"{name:<10}" + " ".join(cells))
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    del argv
    results = measure()
    rates = machine()
    if FORMAT.value == "json":
        print(json.dumps({"machine": rates, "slots": SLOTS.value, "results": results}, indent=1))
        return
    print(
        f"{jax.devices()[0].device_kind}, {THREADS} threads, {SLOTS.value} slots: "
        f"{rates['gflops']:.0f} GFLOP/s, {rates['gbytes_s']:.1f} GB/s"
    )
    print(table(results))


if __name__ == "__main__":
    app.run(main)
