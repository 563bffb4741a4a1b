"""What a step of the ScienceWorld simulator costs, beside the library's own step.

    python -m experiments.benchmarks.scienceworld [--format=json] [--seconds=20]

For 1, 2, 4 and 8 JVMs at once the table gives lean steps per second (those an episode takes), their
ratio to the library's `ScienceWorldEnv.step` with its default flags in one JVM, and the resident
memory per JVM afterwards. Then: the library's step, its memory, and the time to start a JVM, to
start an episode, and to replay 30 turns. Every JVM plays the simulator's own solutions of a few
tasks over and over; starting episodes is not counted in the steps. Takes about three minutes on two
CPU cores.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags
from scienceworld import ScienceWorldEnv

from rlds_jax.tasks.scienceworld.jvm import Jvm

FORMAT = flags.DEFINE_enum("format", "table", ["table", "json"], "How to print the result.")
SECONDS = flags.DEFINE_float("seconds", 20.0, "Seconds of steps per measurement.")

TASKS = ("find-plant", "boil", "chemistry-mix", "power-component")
COUNTS = (1, 2, 4, 8)
MIB = 2**20


def solutions() -> dict[str, list[str]]:
    jvm = Jvm(heap_mb=256)
    paths = {}
    for task in TASKS:
        jvm.load(task, 0, "easy", gold=True)
        paths[task] = jvm.gold_path()
    jvm.kill()
    return paths


def play(
    load: Callable[[str], Any], step: Callable[[str], Any], paths: dict[str, list[str]]
) -> tuple[int, float]:
    """Plays the paths in turn for SECONDS; returns steps and the seconds they took."""
    steps, spent = 0, 0.0
    while True:
        for task, path in paths.items():
            load(task)
            for command in path:
                start = time.perf_counter()
                step(command)
                spent += time.perf_counter() - start
                steps += 1
                if spent > SECONDS.value:
                    return steps, spent


def lean(number: int, paths: dict[str, list[str]]) -> dict[str, float]:
    """Lean steps of `number` JVMs at once."""
    jvms = [Jvm() for _ in range(number)]
    rates = []

    def run(jvm: Jvm) -> None:
        steps, spent = play(lambda task: jvm.load(task, 0, "easy"), jvm.step, paths)
        rates.append(steps / spent)

    threads = [threading.Thread(target=run, args=(jvm,)) for jvm in jvms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory = statistics.mean(jvm.memory for jvm in jvms)
    for jvm in jvms:
        jvm.kill()
    return {"jvms": number, "steps_per_second": sum(rates), "mib_per_jvm": memory / MIB}


def library(paths: dict[str, list[str]]) -> dict[str, float]:
    """The library's own step, with the flags it comes with."""
    environment = ScienceWorldEnv("", envStepLimit=10**6)
    steps, spent = play(lambda task: environment.load(task, 0, "easy"), environment.step, paths)
    pid = environment._gateway.java_process.pid
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    environment.close()
    memory = pages * os.sysconf("SC_PAGE_SIZE")
    return {"steps_per_second": steps / spent, "mib_per_jvm": memory / MIB}


def starts(paths: dict[str, list[str]]) -> dict[str, float]:
    """Seconds to start a JVM, and, warmed up, an episode and a replay of 30 turns."""
    began = time.perf_counter()
    jvm = Jvm()
    started = time.perf_counter() - began
    loads, replays = [], []
    for _ in range(5):
        began = time.perf_counter()
        jvm.load("boil", 0, "easy")
        loaded = time.perf_counter()
        for command in paths["boil"][:30]:
            jvm.step(command)
        loads.append(loaded - began)
        replays.append(time.perf_counter() - loaded)
    jvm.kill()
    return {
        "start_jvm_s": started,
        "start_episode_s": statistics.median(loads),
        "replay_30_turns_s": statistics.median(replays),
    }


def main(argv: list[str]) -> None:
    del argv
    paths = solutions()
    own = library(paths)
    results = [lean(number, paths) for number in COUNTS]
    for result in results:
        result["ratio_to_library"] = result["steps_per_second"] / own["steps_per_second"]
    others = starts(paths)
    if FORMAT.value == "json":
        record = {"cores": os.cpu_count(), "lean": results, "library": own, "starts": others}
        print(json.dumps(record, indent=1))
        return
    print(f"{'JVMs':>5} {'steps/s':>8} {'ratio':>6} {'MiB/JVM':>8}")
    for r in results:
        print(
            f"{r['jvms']:>5} {r['steps_per_second']:>8.1f} {r['ratio_to_library']:>6.1f} "
            f"{r['mib_per_jvm']:>8.0f}"
        )
    print(f"library {own['steps_per_second']:>6.1f} {1.0:>6.1f} {own['mib_per_jvm']:>8.0f}")
    for name, value in others.items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    app.run(main)
