"""What one training step costs, phase by phase, and RLDS beside RLVR.

    python -m experiments.benchmarks.step [--format=json] [--steps=5]

Trains the tiny FrozenLake config under both conditions in one process, a step of each in turn, and
drops the first step of each (it compiles). RLVR plays as many originals as RLDS plays originals and
retries at most; ratios are per row. The work of a step is its prefilled and decoded tokens, each at
the cost per token measured in this run over both conditions. Phases overlap, so their seconds need
not sum to the step's. Takes about three minutes on two CPU cores.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from configs import frozenlake
from rlds_jax.trainer import Trainer

FORMAT = flags.DEFINE_enum("format", "table", ["table", "json"], "How to print the result.")
STEPS = flags.DEFINE_integer("steps", 5, "Measured steps per condition.", lower_bound=1)
CONDITIONS = ("rlds", "rlvr")

Means = Mapping[str, float]


def measure(steps: int) -> dict[str, Means]:
    """Mean metrics of the measured steps, by condition."""
    with tempfile.TemporaryDirectory() as directory:
        trainers = {
            condition: Trainer(
                frozenlake.get_config(f"tiny,{condition}"), Path(directory) / condition
            )
            for condition in CONDITIONS
        }
        seen: dict[str, list[dict[str, float]]] = {condition: [] for condition in CONDITIONS}
        for step in range(1, steps + 2):
            for condition, trainer in trainers.items():
                seen[condition].append(trainer.step(step))
        for trainer in trainers.values():
            trainer.close()
    return {condition: _means(metrics[1:]) for condition, metrics in seen.items()}


def _means(metrics: list[dict[str, float]]) -> Means:
    """Per metric the mean over the steps; a step that lacks it counts as 0."""
    names = {name for each in metrics for name in each}
    return {name: float(np.mean([m.get(name, 0.0) for m in metrics])) for name in names}


def compare(means: Mapping[str, Means]) -> dict[str, float]:
    """Time and work of an RLDS step over those of an RLVR step, both per row."""
    cost = {
        kind: sum(m[f"engine/{kind}_s"] for m in means.values())
        / sum(m[f"engine/{kind}_tokens"] for m in means.values())
        for kind in ("prefill", "decode")
    }
    rows = {c: m["rollout/count"] + m["retry/count"] for c, m in means.items()}
    work = {
        c: sum(cost[kind] * m[f"engine/{kind}_tokens"] for kind in cost) for c, m in means.items()
    }
    update = {c: m["timing_s/update"] for c, m in means.items()}
    seconds = {c: m["perf/time_per_step"] for c, m in means.items()}

    def ratio(values: Mapping[str, float]) -> float:
        return values["rlds"] / rows["rlds"] / (values["rlvr"] / rows["rlvr"])

    generation = {c: seconds[c] - update[c] for c in means}
    return {
        "rows_rlds": rows["rlds"],
        "rows_rlvr": rows["rlvr"],
        "prefill_us_per_token": 1e6 * cost["prefill"],
        "decode_us_per_token": 1e6 * cost["decode"],
        "step_time_ratio": ratio(seconds),
        "rollout_time_ratio": ratio(generation),
        "work_ratio": ratio(work),
        "time_over_work": ratio(generation) / ratio(work),
        "idle_slots_rlds": means["rlds"]["engine/idle_slots"],
        "idle_slots_rlvr": means["rlvr"]["engine/idle_slots"],
    }


def phases(m: Means) -> list[dict[str, float | str]]:
    """One row per phase of an RLDS step: requests, tokens and seconds."""
    originals, retries = m["rollout/count"], m["retry/count"]
    sampled = m["response_length/sampled"]
    rows = [("play", "gen", originals * m["num_turns/mean"], originals * sampled)]
    for phase, role in (("grade", "grader"), ("reflect", "reflector")):
        if count := m[f"{role}/count"]:
            rows.append((phase, phase, count, count * m[f"{role}/response_length"]))
    if retries:
        rows.append(("retry", "retry", retries, retries * m["retry/gen_ratio"] * sampled))
    table: list[dict[str, float | str]] = [
        {"phase": name, "requests": n, "sampled_tokens": tokens, "seconds": m[f"timing_s/{key}"]}
        for name, key, n, tokens in rows
    ]
    table.append(
        {
            "phase": "update",
            "trained_tokens": m["perf/total_num_tokens"],
            "seconds": m["timing_s/update"],
        }
    )
    table.append({"phase": "sync", "seconds": m["timing_s/sync"]})
    table.append({"phase": "whole step", "seconds": m["perf/time_per_step"]})
    return table


def main(_) -> None:
    means = measure(STEPS.value)
    result: dict[str, Any] = {
        "comparison": compare(means),
        "phases": {condition: phases(m) for condition, m in means.items()},
        "engine": {
            condition: {name: x for name, x in m.items() if name.startswith("engine/")}
            for condition, m in means.items()
        },
    }
    if FORMAT.value == "json":
        print(json.dumps(result, indent=2))
        return
    for condition, rows in result["phases"].items():
        print(f"\n{condition}, mean of {STEPS.value} steps")
        columns = ("phase", "requests", "sampled_tokens", "trained_tokens", "seconds")
        print(" ".join(f"{name:>14}" for name in columns))
        for row in rows:
            print(" ".join(_cell(row.get(name)) for name in columns))
    print()
    for name, value in result["comparison"].items():
        print(f"{name:22} {value:8.3f}")


def _cell(value: float | str | None) -> str:
    if value is None:
        return " " * 14
    return f"{value:>14}" if isinstance(value, str) else f"{value:14.2f}"


if __name__ == "__main__":
    app.run(main)
