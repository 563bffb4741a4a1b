"""Whole episodes on real simulators: solutions, replay, divergence, JVMs that die."""

import asyncio
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from rollouts.rollout_doubles import build_tokenizer, make_context

from rlds_jax.rollouts.context import RolloutKey
from rlds_jax.rollouts.episode import run_original, run_retry
from rlds_jax.rollouts.group import run_groups
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.scienceworld import items
from rlds_jax.tasks.scienceworld.jvm import Jvm
from rlds_jax.tasks.scienceworld.task import ScienceWorld

pytestmark = pytest.mark.jvm

GOLD = json.loads((Path(__file__).parents[2] / "cases" / "scienceworld_gold.json").read_text())
PATHS = GOLD["paths"]
LONG = {task for task in PATHS if task.startswith("mendelian")}  # seconds per growing plant


def item(task, variation=0):
    data = {"task": task, "variation": variation, "simplification": "easy"}
    return Item(f"{task}-{variation}", data)


def act(action):
    return f"<think>the plan</think><action>{action}</action>"


def without_repeats(path):
    """The path with a list asked for between repetitions, which would end an episode."""
    for action, run in itertools.groupby(path):
        for i, _ in enumerate(run):
            if i and i % 2 == 0:
                yield "objects"
            yield action


@pytest.fixture(scope="module")
def task():
    """Two simulators, which all tests share that leave them whole."""
    task = ScienceWorld(max_turns=1000, jvms=2)
    yield task
    task.close()


async def play(task, name):
    environment = task.environment(item(name))
    try:
        await environment.reset()
        for action in without_repeats(PATHS[name]):
            result = await environment.step(act(action))
            if result.done:
                return result
        return result
    finally:
        await environment.close()


def play_all(task, names):
    async def run():
        return await asyncio.gather(*(play(task, name) for name in names))

    return dict(zip(names, asyncio.run(run()), strict=True))


def check_solved(results):
    assert {name: result.metrics.get("score") for name, result in results.items()} == dict.fromkeys(
        results, 100
    )
    for result in results.values():
        assert result.success
        assert result.ended_by == "completed"
        assert 1 < result.reward <= 1.05


def test_the_solutions_cover_every_task():
    assert set(PATHS) == set(items.VARIATIONS)


def test_every_solution_scores_100(task):
    check_solved(play_all(task, [name for name in PATHS if name not in LONG]))


@pytest.mark.slow
def test_the_longest_solutions_score_100(task):
    check_solved(play_all(task, sorted(LONG)))


def test_a_cached_solution_is_the_simulator_s():
    jvm = Jvm(heap_mb=256)
    jvm.load("lifespan-longest-lived", 0, "easy", gold=True)
    assert jvm.gold_path() == PATHS["lifespan-longest-lived"]
    jvm.kill()


# Replay


def random_episode(jvm, rng, name, variation, turns):
    """Plays random valid actions; returns them, and everything the simulator said."""
    record, actions = [jvm.load(name, variation, "easy")], []
    valid = []
    for turn in range(turns):
        if turn % 2 == 0:
            listed = json.loads(jvm.call("getValidActionObjectCombinationsJSON"))["validActions"]
            valid = [entry["action"] for entry in listed if entry["action"] != "reset task"]
        actions.append(rng.choice(valid))
        record.append(jvm.step(actions[-1]))
    return actions, record


def replay(jvm, name, variation, actions):
    return [jvm.load(name, variation, "easy"), *(jvm.step(action) for action in actions)]


def check_replays(pool, number, turns):
    """Random episodes over all tasks, replayed in shuffled order on whatever JVM is free."""
    rng = random.Random(0)
    names = list(items.VARIATIONS)
    episodes = [(names[i % len(names)], rng.randrange(10), rng.random()) for i in range(number)]

    async def on_a_jvm(function, *args):
        lease = await pool.lease()
        try:
            return id(lease.jvm), await lease.run(function, lease.jvm, *args)
        finally:
            lease.close()

    def record(jvm, name, variation, seed):
        return random_episode(jvm, random.Random(seed), name, variation, turns)

    async def run():
        made = await asyncio.gather(
            *(on_a_jvm(record, name, variation, seed) for name, variation, seed in episodes)
        )
        order = rng.sample(range(number), number)
        again = await asyncio.gather(
            *(on_a_jvm(replay, *episodes[i][:2], made[i][1][0]) for i in order)
        )
        differing = [
            episodes[i][:2]
            for i, (_, said) in zip(order, again, strict=True)
            if said != made[i][1][1]
        ]
        moved = sum(jvm != made[i][0] for i, (jvm, _) in zip(order, again, strict=True))
        return differing, moved

    differing, moved = asyncio.run(run())
    assert not differing
    assert moved > number / 10


@pytest.mark.slow
def test_two_hundred_random_episodes_repeat_themselves(task):
    check_replays(task.pool, number=200, turns=4)


KEY = RolloutKey(step=1, slot=0, rollout=0)
PAINT = "chemistry-mix-paint-secondary-color"


def scripted(path):
    """Plays a path, whatever it sees."""
    return lambda request: act(path[min(request.turn, len(path) - 1)])


def play_and_retry(task, start):
    """An original that plays a solution, and its retry from turn `start`."""
    context = make_context(
        build_tokenizer(),
        scripted(PATHS[PAINT]),
        task,
        max_context=65536,
        max_prompt_tokens=16384,
        max_response_tokens=32768,
    )
    events = Counter()

    async def run():
        original = await run_original(context, KEY, item(PAINT), events)
        return original, await run_retry(context, KEY, item(PAINT), original, start, "Mix.", events)

    return *asyncio.run(run()), events


def test_a_retry_reaches_its_turn_by_replay(task):
    original, retried, events = play_and_retry(task, start=18)
    assert original.success
    assert retried.success
    assert retried.retry_from == 18
    assert retried.turns[:18] == original.turns[:18]
    assert retried.scores == original.scores
    assert max(original.scores) == 100
    assert not events


def test_without_determinism_a_replay_diverges_and_starts_over():
    """The second episode of a JVM lists the same things in another order."""
    task = ScienceWorld(jvms=1, deterministic=False)
    try:
        original, retried, events = play_and_retry(task, start=20)
    finally:
        task.close()
    assert events == {"replay_diverged": 1}
    assert retried.retry_from == 0
    assert retried.turns[0].observation == original.turns[0].observation
    assert (retried.turn_ids >= 0).sum() == retried.sampled_tokens


# JVMs that die


def check_kills(episodes, every):
    """Groups of rollouts while a JVM is killed every few moments: all are accounted for."""
    task = ScienceWorld(jvms=2, max_turns=8)
    path = [*PATHS["find-plant"][:4], "wait", "look around"]
    context = make_context(
        build_tokenizer(),
        lambda request: act(path[request.turn % len(path)]),
        task,
        max_context=65536,
        condition="rlvr",
        group_size=5,
        max_prompt_tokens=16384,
        max_response_tokens=32768,
    )
    rng = random.Random(0)
    seen = set()
    killed = 0

    async def killer():
        nonlocal killed
        while True:
            await asyncio.sleep(rng.uniform(0.5, 1.5) * every)
            jvms = task.pool.jvms
            seen.update(jvm.process for jvm in jvms)
            if jvms:
                rng.choice(jvms).process.kill()
                killed += 1

    async def run():
        killing = asyncio.create_task(killer())
        chosen = [item("find-plant", i) for i in range(episodes // 5)]
        groups = await asyncio.wait_for(run_groups(context, chosen, step=1), timeout=900)
        killing.cancel()
        return groups

    try:
        groups = asyncio.run(run())
    finally:
        task.close()
    rows = [row for group in groups for row in group.trajectories]
    events = sum((group.events for group in groups), Counter())
    died = [row for row in rows if row.ended_by == "env_error"]
    assert len(rows) + events["dropped/env_error"] == episodes
    assert sum(count for name, count in events.items() if name.startswith("env_error/")) == len(
        died
    )
    assert {row.reward for row in died} <= {0.0}
    assert killed
    assert died
    assert all(process.poll() is not None for process in seen)


@pytest.mark.slow
def test_a_hundred_rollouts_while_jvms_die():
    check_kills(episodes=100, every=2.5)
