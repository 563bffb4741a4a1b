"""Runs Qwen3-4B's update on this machine's accelerators, and holds it against itself and its plan.

    python -m experiments.gpu_check

The weights are random, so it needs no network. Each row length, attention kernel and remat policy
takes steps on one packed batch from the same weights, in a process of its own. Losses and gradient
norms of one length must agree, whatever the kernel and the policy; a kernel that does not run and a
length that does not fit are reported. Tokens/s and MFU are of the best step after the first, memory
is what the device reports beside what the compiled program says. Exit code 1 if any disagree.

The state of 4 billion parameters takes 69 GB over all devices: on one of 80 GB give fewer --layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from absl import app, flags

from configs import hotpotqa
from experiments import random_batch
from rlds_jax import batch as batching
from rlds_jax import metrics, plan, sharding, update
from rlds_jax.models import attention_gate, qwen3
from rlds_jax.models.attention import Implementation
from rlds_jax.models.config import QWEN3_4B, ModelConfig

LENGTHS = flags.DEFINE_list("lengths", ["1024", "8192", "20480"], "Row lengths.")
ATTENTIONS = flags.DEFINE_list("attentions", ["cudnn", "pallas", "blockwise"], "Kernels.")
REMATS = flags.DEFINE_list("remats", ["full", "dots", "none"], "Remat policies.")
TOKENS = flags.DEFINE_integer("tokens", 16384, "Tokens of a micro-batch and device, at least.")
LAYERS = flags.DEFINE_integer("layers", QWEN3_4B.num_layers, "Layers of the model.")
STEPS = flags.DEFINE_integer("steps", 3, "Steps of each setting.")
_ONE = flags.DEFINE_string("one", "", "Run this setting alone: length,attention,remat.")
TOLERANCE = 0.02  # of loss and gradient norm in bfloat16, relative


class Setting(NamedTuple):
    """What a row of the table is about."""

    length: int
    attention: Implementation
    remat: qwen3.Remat

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Reads "length,attention,remat"."""
        length, attention, remat = text.split(",")
        return cls(int(length), cast(Implementation, attention), cast(qwen3.Remat, remat))


class Update:
    """The update of a setting on `devices`, and random rows full of unequal segments.

    Args:
      rows: of a micro-batch; the batch is one.
      dtype: of activations and the reference.
    """

    def __init__(
        self, model: ModelConfig, setting: Setting, rows: int, devices: Any, dtype: str = "bfloat16"
    ):
        config = hotpotqa.get_config()
        config.batch.update(rows=rows, row_length=setting.length, max_micro=1)
        config.compute.update(remat=setting.remat, dtype=dtype)
        mesh = sharding.make_mesh(devices=devices)
        self.program = plan.program(config, model, mesh, setting.attention)
        self.compiled = self.program.lower().compile()

    def batch(self) -> batching.Batch:
        layout = self.program.layout
        parts = (2, 4, 8, 8)  # of a row's length
        lengths = [layout.row_length // part for part in parts] * layout.rows
        rng = np.random.default_rng(0)
        made = random_batch.make(lengths, self.program.model.vocab_size, rng)
        found = random_batch.records(made)
        rows = [found[first : first + len(parts)] for first in range(0, len(found), len(parts))]
        return batching.lay_out(rows, layout)

    def steps(self, number: int) -> dict[str, Any]:
        """Loss and gradient norm of the first of `number` steps, and what the best one took."""
        program = self.program
        transform = update.make_optimizer(program.optimizer)
        layout = update.state_shardings(program.model, transform, program.mesh)
        random = jax.jit(
            lambda key: qwen3.init_params(program.model, key), out_shardings=layout.params
        )
        reference = jax.tree.map(
            lambda x: x.astype(program.compute.dtype), random(jax.random.key(1))
        )
        state = update.init_state(random(jax.random.key(0)), transform, jax.random.key(0))
        state = jax.device_put(state, layout)
        batch = update.put_batch(self.batch(), program.mesh)
        seconds, seen = [], []
        for _ in range(number):
            started = time.perf_counter()
            state, outcome = self.compiled(state, reference, batch)
            seen.append(update.metrics(outcome))
            seconds.append(time.perf_counter() - started)
        best, devices = min(seconds[1:] or seconds), program.mesh.size
        return {
            "loss": seen[0]["actor/loss"],
            "gradient_norm": seen[0]["actor/grad_norm"],
            "tokens_per_s": program.layout.rows * program.layout.row_length / best / devices,
            "mfu": metrics.mfu(plan.useful_flops(program), best),
            "memory": metrics.memory_peak(),
            "planned_memory": plan.peak(self.compiled),
        }


def disagreements(results: Sequence[tuple[Setting, dict[str, Any]]]) -> list[str]:
    """Settings whose loss or gradient norm is not that of the first setting of their length."""
    first: dict[int, dict[str, Any]] = {}
    found = []
    for setting, result in results:
        expected = first.setdefault(setting.length, result)
        for name in ("loss", "gradient_norm"):
            if not np.isclose(result[name], expected[name], rtol=TOLERANCE, atol=1e-4):
                found.append(f"{setting}: {name} is {result[name]:.5g}, not {expected[name]:.5g}")
    return found


def run_one(setting: Setting) -> None:
    model = dataclasses.replace(QWEN3_4B, num_layers=LAYERS.value)
    fault = attention_gate.fault(setting.attention, model, "bfloat16")
    if fault:
        raise SystemExit(f"the gate refuses {setting.attention}: {fault}")
    rows = jax.device_count() * max(TOKENS.value // setting.length, 1)
    print(json.dumps(Update(model, setting, rows, jax.devices()).steps(STEPS.value)))


def main(argv: list[str]) -> None:
    del argv
    if _ONE.value:
        run_one(Setting.parse(_ONE.value))
        return
    results = []
    for name in map(",".join, itertools.product(LENGTHS.value, ATTENTIONS.value, REMATS.value)):
        command = [sys.executable, "-m", "experiments.gpu_check", *sys.argv[1:], f"--one={name}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it died"])[-1]
            print(f"{name:<26}does not run: {last[:200]}")
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        results.append((Setting.parse(name), result))
        print(f"{name:<26}{row(result)}", flush=True)
    wrong = disagreements(results)
    print("\n".join(wrong) or f"{len(results)} settings agree")
    raise SystemExit(bool(wrong) or not results)


def row(result: dict[str, Any]) -> str:
    """The result of a setting for people; what a device does not tell is left out."""
    cells = [f"loss {result['loss']:.5f}", f"gradient {result['gradient_norm']:.5f}"]
    cells.append(f"{result['tokens_per_s']:.0f} tokens/s/device")
    if result["mfu"] is not None:
        cells.append(f"MFU {result['mfu']:.2f}")
    planned = f"{result['planned_memory'] / 2**30:.1f} GiB planned"
    held = result["memory"]
    cells.append(planned if held is None else f"{held / 2**30:.1f} GiB of {planned}")
    return ", ".join(cells)


if __name__ == "__main__":
    app.run(main)
