import asyncio
import itertools
import random
import re
import sys

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlds_jax.tasks.base import Item
from rlds_jax.tasks.frozenlake import STEPS, Board, FrozenLake, draw_board, parse_move

BOARD = ["A D C", "C D D", "D B D"]
GYM_ACTIONS = {"Left": 0, "Down": 1, "Right": 2, "Up": 3}
GYM_TILES = str.maketrans("ABCD", "SGHF")
MEANINGS = re.compile(
    r"\b(holes?|goals?|safe|agent|player|ice|frozen|lake|fell|fall|danger)\b", re.I
)


def act(move):
    return f"<think>try</think><action>{move}</action>"


def play(environment, texts):
    """Plays until done; returns the first observation and the step results."""

    async def run():
        first = await environment.reset()
        results = []
        for text in texts:
            results.append(await environment.step(text))
            if results[-1].done:
                break
        await environment.close()
        return first, results

    return asyncio.run(run())


def environment(rows=BOARD, **options):
    return FrozenLake(**options).environment(Item("test", {"board": rows}))


# Moves and endings


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    moves=st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=20),
)
def test_moves_rewards_and_ends_are_gymnasium_s(seed, moves):
    task = FrozenLake(size=(2, 8), max_turns=len(moves) + 1)
    rows = draw_board(task, np.random.default_rng(seed))
    oracle = gymnasium.make(
        "FrozenLake-v1",
        desc=[row.replace(" ", "").translate(GYM_TILES) for row in rows],
        is_slippery=False,
        max_episode_steps=1000,
    )
    columns = len(rows[0].split())
    state, _ = oracle.reset()
    env = environment(rows, max_turns=task.max_turns)
    _, results = play(env, map(act, moves))
    for move, result, turn in zip(moves, results, env.log, strict=False):
        assert turn.before == divmod(int(state), columns)
        state, reward, terminated, _, _ = oracle.step(GYM_ACTIONS[move])
        assert turn.after == divmod(int(state), columns)
        assert turn.edge == (turn.after == turn.before)
        assert (result.done, result.reward, result.success) == (terminated, reward, reward == 1)
    assert len(results) == len(moves) or results[-1].done
    oracle.close()


@pytest.mark.parametrize(
    ("moves", "ended_by", "reward", "words"),
    [
        (["Right", "Down", "Down"], "goal", 1.0, "moved onto the B tile, the goal"),
        (["Down"], "hole", 0.0, "moved onto a C tile and fell into the hole"),
        (["Up"] * 4, "max_turns", 0.0, "No turns left"),
    ],
)
def test_the_terminal_observation_names_its_cause(moves, ended_by, reward, words):
    _, results = play(environment(max_turns=4), map(act, moves))
    assert (results[-1].ended_by, results[-1].reward) == (ended_by, reward)
    assert results[-1].success == (ended_by == "goal")
    assert words in results[-1].observation
    assert not any(result.done for result in results[:-1])


def test_reaching_the_goal_on_the_last_turn_wins():
    _, results = play(environment(max_turns=3), map(act, ["Right", "Down", "Down"]))
    assert results[-1].ended_by == "goal"


def test_conclude_scores_the_state_not_the_text():
    env = environment()

    async def run():
        await env.reset()
        await env.step("You won! <action>Right</action>")
        return await env.conclude("response_budget")

    result = asyncio.run(run())
    assert (result.done, result.reward, result.success) == (True, 0.0, False)
    assert result.ended_by == "response_budget"
    assert "response_budget" in result.observation


def test_an_ended_episode_refuses_steps_until_reset():
    env = environment()
    with pytest.raises(RuntimeError, match="reset"):
        asyncio.run(env.step(act("Up")))
    play(env, [act("Down")])
    with pytest.raises(RuntimeError, match="reset"):
        asyncio.run(env.step(act("Up")))
    _, results = play(env, [act("Right")])
    assert not results[-1].done
    assert len(env.log) == 1


def test_restore_is_refused_because_replay_executes():
    assert FrozenLake().replay == "execute"
    with pytest.raises(RuntimeError, match="execution"):
        asyncio.run(environment().restore([]))


# Observations


def test_observations_show_grid_notes_and_turns_left():
    first, results = play(environment(max_turns=4), [act("Up"), "no action", act("Right")])
    assert first == "A D C\nC D D\nD B D\nTurns left: 4"
    assert [result.observation for result in results] == [
        "A D C\nC D D\nD B D\nYou hit the edge and stayed in place.\nTurns left: 3",
        "A D C\nC D D\nD B D\nInvalid action: nothing moved.\nTurns left: 2",
        "D A C\nC D D\nD B D\nTurns left: 1",
    ]


def test_only_terminal_observations_reveal_meanings():
    task = FrozenLake()
    shown, terminal = [task.system_prompt()], []
    for item, seed in zip(task.items("train")[:50], itertools.count()):
        moves = random.Random(seed).choices([*map(act, STEPS), "nothing"], k=task.max_turns)
        first, results = play(task.environment(item), moves)
        shown += [first, *(result.observation for result in results if not result.done)]
        terminal += [result.observation for result in results if result.done]
    assert not [text for text in shown if MEANINGS.search(text)]
    assert all(MEANINGS.search(text) for text in terminal)


def test_the_system_prompt_is_short_and_guidance_fills_its_playbook():
    task = FrozenLake()
    empty = task.system_prompt()
    assert len(empty.split()) <= 110
    for section in ("Game Rules", "Strategic Playbook"):
        assert f"## {section}\n(to be discovered" in empty
    guided = task.system_prompt("Avoid C. {Go} around.")
    assert guided.endswith("## Strategic Playbook\nAvoid C. {Go} around.")
    assert guided.startswith(empty.split("## Strategic")[0])
    assert "hole" in FrozenLake(legend=True).system_prompt()


def test_subtask_weights_sum_to_one():
    assert sum(subtask.weight for subtask in FrozenLake.subtasks) == pytest.approx(1)
    assert [subtask.name for subtask in FrozenLake.subtasks] == [
        "path_planning",
        "hazard_identification",
        "state_position_tracking",
        "dead_end_detection",
        "boundary_awareness",
    ]


# The true log


def test_the_log_tells_what_happened():
    env = environment()
    play(env, [act("Up"), "eh", act("Right"), act("Right")])
    edge, invalid, right, hole = env.log
    assert (edge.edge, edge.invalid, edge.hole) == (True, False, False)
    assert (edge.before, edge.after) == ((0, 0), (0, 0))
    assert (invalid.edge, invalid.invalid, invalid.move) == (False, True, None)
    assert (right.before, right.after, right.move) == ((0, 0), (0, 1), "Right")
    assert (right.distance_before, right.distance_after) == (3, 2)
    assert (hole.hole, hole.distance_before, hole.distance_after) == (True, 2, None)


def test_metrics_count_edges_and_invalid_actions():
    _, results = play(environment(), [act("Up"), "eh", act("Left"), act("Down")])
    assert results[-1].metrics == {"edge_hits": 2, "invalid_actions": 1}


# Parsing


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("<action>Up</action>", "Up"),
        ("<ACTION> down </Action>", "Down"),
        ("<action>LEFT</action><action>Right</action>", "Left"),
        ("<action>Jump</action> then <action>Right</action>", "Right"),
        ("<think>go</think>\n<action>\nUp\n</action>", "Up"),
        ("<think><action>Up</action></think><action>Down</action>", "Down"),
        ("<think><action>Up</action></think>", None),
        ("<think>cut <action>Up</action>", None),
        ("thought</think><action>Up</action>", "Up"),
        ("<action>Up</action", None),
        ("<action>R\u0131ght</action>", None),  # a dotless i, which case folds to an ASCII one
        ("<action>Up Down</action>", None),
        ("<action></action>", None),
        ("Up", None),
        ("", None),
    ],
)
def test_parse_move(text, move):
    assert parse_move(text) == move


# Items


def shortest_path(rows):
    """Breadth-first by whole frontiers on the rendered text, independent of Board."""
    cells = {(r, c): s for r, row in enumerate(rows) for c, s in enumerate(row.split())}
    frontier, seen = {cell for cell, symbol in cells.items() if symbol == "A"}, set()
    for length in itertools.count():
        if any(cells[cell] == "B" for cell in frontier):
            return length
        seen |= frontier
        around = {(r + dr, c + dc) for r, c in frontier for dr, dc in STEPS.values()}
        frontier = {cell for cell in around - seen if cells.get(cell, "C") != "C"}
        if not frontier:
            return None


def test_boards_keep_the_options():
    task = FrozenLake(size=(4, 6), min_path=3, max_path=7)
    sizes = set()
    for item in task.items("train")[:200]:
        rows = item.data["board"]
        sizes.add(len(rows))
        text = " ".join(rows).split()
        assert len(text) == len(rows) ** 2
        assert (text.count("A"), text.count("B")) == (1, 1)
        assert 3 <= shortest_path(rows) <= 7
        board = Board.parse(rows)
        assert board.distances()[board.start] == shortest_path(rows)
    assert sizes == {4, 5, 6}


def test_the_share_of_frozen_tiles_is_the_configured_one():
    task = FrozenLake(size=(8, 8), frozen=(0.7, 0.7), max_path=64)
    boards = ["".join(item.data["board"]) for item in task.items("train")[:100]]
    share = sum(board.count("D") for board in boards) / sum(
        board.count("D") + board.count("C") for board in boards
    )
    assert share == pytest.approx(0.7, abs=0.03)


def test_items_are_lazy_reproducible_and_disjoint():
    train, validation = FrozenLake().items("train"), FrozenLake().items("validation")
    assert (len(train), len(validation)) == (20_000, 500)
    assert sum(map(sys.getsizeof, vars(train).values())) < 1000
    assert train[19_999] == FrozenLake().items("train")[-1]
    assert train[3:5] == [train[3], train[4]]
    assert train[7] != FrozenLake(seed=1).items("train")[7]
    boards = [{tuple(item.data["board"]) for item in split[:500]} for split in (train, validation)]
    assert len(boards[0] | boards[1]) == 1000
    assert train[0].id != validation[0].id
    with pytest.raises(IndexError):
        train[20_000]
    with pytest.raises(ValueError, match="split"):
        FrozenLake().items("test")


def test_impossible_bounds_are_named():
    task = FrozenLake(size=(2, 2), min_path=9, max_path=9)
    with pytest.raises(ValueError, match=r"min_path\.\.max_path"):
        task.items("train")[0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "equal length"),
        (["AD", "B"], "equal length"),
        (["AX", "DB"], r"symbols.*'X'"),
        (["DD", "DB"], "exactly one A"),
        (["AB", "DB"], "exactly one B"),
        (["AC", "CB"], "cannot be reached"),
    ],
)
def test_an_explicit_board_is_validated(rows, message):
    with pytest.raises(ValueError, match=message):
        environment(rows)


def test_an_item_without_a_board_is_refused():
    with pytest.raises(ValueError, match=r"x.*board"):
        FrozenLake().environment(Item("x", {}))


@pytest.mark.parametrize(
    "options",
    [
        {"size": (1, 4)},
        {"size": (4,)},
        {"size": (6, 5)},
        {"frozen": (0.9, 0.8)},
        {"min_path": 5, "max_path": 4},
        {"max_turns": 0},
        {"train_items": 0},
        {"seed": -1},
    ],
)
def test_bad_options_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        FrozenLake(**options)
