"""One optimizer step of ours and of transformers with torch, on the same sequences.

    python -m experiments.record train_step experiments.benchmarks.train_step --format=json

A Qwen3-shaped model (12.6 M parameters, float32) is trained on 64 sequences of random ids, lengths
log-uniform in [64, 1024], the first quarter of each a prompt: clipped policy loss and k3 KL against
a reference whose forward is in the timing, then AdamW with clipped gradients. transformers takes
micro-batches of 8 rows in random order, each padded to its longest. Both start from one directory,
and their first losses and gradient norms must agree. Sides run in processes of their own, two
threads each; the best of `repeats` steps counts, after one that compiles or warms up.

tokens_per_s counts the tokens of the sequences, no padding. FLOPs are the least a step needs: what
ours computes twice (the logits, for their gradient) does not count. matmul_share is their rate over
that of one product of the model's shape, 8192 x 384 x 1024, in the same process. Memory is the most
that a process ever held.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from absl import app, flags

from experiments import random_batch
from experiments.benchmarks.small_model import CONFIG
from experiments.random_batch import RandomSequence
from rlds_jax import batch as batching
from rlds_jax import losses, sharding, update
from rlds_jax.models import qwen3, weights

FORMAT = flags.DEFINE_enum("format", "table", ["table", "json"], "How to print the result.")
REPEATS = flags.DEFINE_integer("repeats", 3, "Timed steps per side; the best counts.")
ROWS = flags.DEFINE_integer("rows", 1, "Rows of our micro-batches.")
LENGTH = flags.DEFINE_integer("row_length", 2048, "Tokens of our rows.")
_SIDE = flags.DEFINE_enum("side", None, ["ours", "theirs"], "Run this side alone.")
_MODEL = flags.DEFINE_string("model", "", "Directory of the model, with `side`.")

THREADS, MICRO_BATCH = 2, 8
KL, LEARNING_RATE, DECAY, CLIP = 0.001, 1e-6, 0.01, 1.0
LOSS = losses.LossConfig(kl_coefficient=KL, importance_cap=None)


class Measured(NamedTuple):
    """One side: seconds of its best step, loss and gradient norm of its first, bytes, FLOP/s."""

    seconds: float
    loss: float
    gradient_norm: float
    memory: int
    matmul: float


def sequences() -> list[RandomSequence]:
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(64), np.log(1025), 64)).astype(int)
    return random_batch.make(lengths, CONFIG.vocab_size, rng)


def ours(directory: str) -> Measured:
    _, params = weights.load(directory)
    _, reference = weights.load(directory)
    optimizer = update.OptimizerConfig(
        learning_rate=LEARNING_RATE, weight_decay=DECAY, clip_norm=CLIP
    )
    compute = update.ComputeConfig(logprob_chunk=1024)
    mesh = sharding.make_mesh()
    step = update.make_update(CONFIG, optimizer, LOSS, compute, mesh)
    batch = update.put_batch(_packed(), mesh)
    layout = update.state_shardings(CONFIG, update.make_optimizer(optimizer), mesh)
    state = update.init_state(params, update.make_optimizer(optimizer), jax.random.key(0))
    state, reference = jax.device_put((state, reference), (layout, layout.params))

    def run() -> tuple[float, float]:
        nonlocal state
        state, outcome = step(state, reference, batch)
        metrics = update.metrics(outcome)
        return metrics["actor/loss"], metrics["actor/grad_norm"]

    a, b = jnp.ones((8192, 384)), jnp.ones((384, 1024))
    product = jax.jit(jnp.matmul)
    return _measured(run, lambda: jax.block_until_ready(product(a, b)))


def _packed() -> batching.Batch:
    rows = batching.first_fit(random_batch.records(sequences()), LENGTH.value)
    layout = batching.BatchLayout(ROWS.value, LENGTH.value, -(-len(rows) // ROWS.value))
    return batching.lay_out(rows, layout)


def theirs(directory: str) -> Measured:
    torch.set_num_threads(THREADS)
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for _ in range(2)
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=DECAY)
    everything = sequences()
    total = sum(len(s.ids) - s.prompt for s in everything)
    order = np.random.default_rng(1).permutation(len(everything))
    micro_batches = [
        _padded([everything[i] for i in order[first : first + MICRO_BATCH]])
        for first in range(0, len(order), MICRO_BATCH)
    ]

    def run() -> tuple[float, float]:
        optimizer.zero_grad()
        loss = 0.0
        for ids, mask, sampled, advantage in micro_batches:
            logprobs = _logprobs(policy, ids, mask)
            with torch.no_grad():
                there = _logprobs(reference, ids, mask)
            part = torch.sum(sampled * _token_loss(logprobs, there, advantage)) / total
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        optimizer.step()
        return loss, float(norm)

    a, b = torch.ones(8192, 384), torch.ones(384, 1024)
    return _measured(run, lambda: a @ b)


def _padded(rows: list[RandomSequence]) -> tuple[torch.Tensor, ...]:
    """Ids, attention mask, mask of sampled targets and advantages of one micro-batch."""
    longest = max(len(row.ids) for row in rows)
    ids = np.zeros((len(rows), longest), np.int64)
    mask, sampled = np.zeros_like(ids), np.zeros((len(rows), longest - 1), np.float32)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = row.ids
        mask[place, : len(row.ids)] = 1
        sampled[place, row.prompt - 1 : len(row.ids) - 1] = 1
    advantage = np.array([[row.advantage] for row in rows], np.float32)
    return tuple(map(torch.from_numpy, (ids, mask, sampled, advantage)))


def _logprobs(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits = model(ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]


def _token_loss(logprobs, reference, advantage):
    ratio = torch.exp(logprobs - logprobs.detach())
    low, high = 1 - LOSS.clip_low, 1 + LOSS.clip_high
    policy = torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, low, high))
    difference = reference - logprobs
    return policy + KL * (torch.exp(difference) - difference - 1)


def _measured(run: Callable[[], tuple[float, float]], product: Callable[[], Any]) -> Measured:
    loss, norm = run()
    seconds = min(_seconds(run) for _ in range(REPEATS.value))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rate = 2 * 8192 * 384 * 1024 / min(_seconds(product) for _ in range(20))
    return Measured(seconds, loss, norm, memory, rate)


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def least_flops() -> float:
    """Of the policy forward and backward and the reference forward, over what is not padding.

    Layers run on every token, the head where there is a target, attention is causal.
    """
    everything = sequences()
    layers = sum(
        int(np.prod(p.shape))
        for path, p in qwen3.parameter_table(CONFIG).items()
        if p.stacked and "norm" not in path
    )
    tokens = sum(len(s.ids) for s in everything)
    targets = sum(len(s.ids) - s.prompt for s in everything)
    width = CONFIG.num_layers * CONFIG.num_heads * CONFIG.head_dim
    attention = sum(len(s.ids) ** 2 for s in everything) * width
    products = layers * tokens + CONFIG.hidden_size * CONFIG.vocab_size * targets + attention
    return (6 + 2) * float(products)


def measure() -> dict[str, Any]:
    """Both sides, each in its own process.

    Raises:
      RuntimeError: they do not compute the same.
    """
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        params = qwen3.init_params(CONFIG, jax.random.key(0))
        weights.save(params, CONFIG, directory, dtype=jnp.float32)
        for side in ("ours", "theirs"):
            command = [sys.executable, "-m", __spec__.name, f"--side={side}"]
            command += [f"--model={directory}", f"--repeats={REPEATS.value}"]
            command += [f"--rows={ROWS.value}", f"--row_length={LENGTH.value}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found[side] = Measured(*json.loads(done.stdout))
    mine, yours = found["ours"], found["theirs"]
    if not np.allclose(mine[1:3], yours[1:3], rtol=1e-3, atol=1e-5):
        raise RuntimeError(f"loss and gradient norm differ: {mine[1:3]} and {yours[1:3]}")
    tokens = sum(len(s.ids) for s in sequences())
    sides = {
        name: {
            "seconds": side.seconds,
            "tokens_per_s": tokens / side.seconds,
            "matmul_share": least_flops() / side.seconds / side.matmul,
            "matmul_gflops": side.matmul / 1e9,
            "memory_mb": side.memory / 1e6,
        }
        for name, side in found.items()
    }
    return {"tokens": tokens, "ratio": yours.seconds / mine.seconds, **sides}


def main(argv: list[str]) -> None:
    del argv
    if _SIDE.value:
        print(json.dumps({"ours": ours, "theirs": theirs}[_SIDE.value](_MODEL.value)))
        return
    result = measure()
    if FORMAT.value == "json":
        print(json.dumps(result, indent=1))
        return
    for side in ("ours", "theirs"):
        r = result[side]
        print(
            f"{side:<8}{r['tokens_per_s']:6.0f} tokens/s, {r['matmul_share']:.0%} of a matmul's "
            f"{r['matmul_gflops']:.0f} GFLOP/s, {r['memory_mb']:.0f} MB"
        )
    print(f"ratio   {result['ratio']:.2f}x on {result['tokens']} tokens")


if __name__ == "__main__":
    app.run(main)
