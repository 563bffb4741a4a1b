"""The rules of an episode, on a simulator that answers from a script."""

import asyncio

import pytest

from rlds_jax.tasks.base import EpisodeError
from rlds_jax.tasks.scienceworld.environment import ScienceWorldEnvironment
from rlds_jax.tasks.scienceworld.jvm import Answer, JvmFailed
from rlds_jax.tasks.scienceworld.task import ScienceWorld

QUESTION = "Ambiguous request: Please enter the number for the action you intended\n0:\tx\n1:\ty"
UNKNOWN = "No known action matches that input."


class ScriptedJvm:
    """Says "did X" to a command X, at score 0, except where `script` has an answer or a failure."""

    def __init__(self, script):
        self.script, self.sent = script, []

    def load(self, task, variation, simplification):
        answer = self.script.get("load", "the task")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def step(self, command):
        self.sent.append(command)
        answer = self.script.get(command, f"did {command}")
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Answer) else Answer(answer, 0, False)

    def ask(self, command):
        return self.step(command).observation


class ScriptedPool:
    """Pool and lease in one."""

    def __init__(self, script):
        self.jvm, self.leased, self.closed = ScriptedJvm(script), 0, 0

    async def lease(self):
        self.leased += 1
        return self

    async def run(self, method, *args):
        return method(*args)

    def close(self):
        self.closed += 1


def play(actions, script=None, task="boil", think=True, max_turns=30, pool=None):
    """The step results of an episode; None among the actions is a turn without a tag."""
    pool = pool or ScriptedPool(script or {})

    async def run():
        environment = ScienceWorldEnvironment(pool, task, 0, "easy", max_turns)
        await environment.reset()
        results = []
        for action in actions:
            tag = "nothing" if action is None else f"<action>{action}</action>"
            results.append(await environment.step(f"<think>why</think>{tag}" if think else tag))
            if results[-1].done:
                break
        await environment.close()
        return results

    return asyncio.run(run())


def test_every_later_observation_ends_with_the_reminder():
    for result in play(["look", None, "reset task", "help", "dance"], {"dance": UNKNOWN}):
        assert result.observation.endswith("Write <think>...</think><action>command</action>")
    assert "Turns left: 29." in play(["look"])[0].observation


def test_a_turn_without_a_tag_is_spent_and_sent_nowhere():
    pool = ScriptedPool({})
    results = play([None, None, None, None], pool=pool, max_turns=4)
    assert "No command was found" in results[0].observation
    assert results[-1].ended_by == "max_turns"
    assert results[-1].metrics["rejected_turns"] == 4
    assert pool.jvm.sent == []
    assert pool.closed == 1


@pytest.mark.parametrize("action", ["reset task", "Reset THE task", " reset\ttask "])
def test_reset_is_blocked(action):
    pool = ScriptedPool({})
    (result,) = play([action], pool=pool)
    assert "cannot be reset" in result.observation
    assert pool.jvm.sent == []


def test_meta_commands_count_as_no_verb_and_hide_reset():
    script = {"help": "Possible actions: \n\teat OBJ\n\treset task\n\twait"}
    results = play(["help", "objects", "task"], script, max_turns=3)
    assert "reset task" not in results[0].observation
    assert "\twait" in results[0].observation
    assert results[-1].metrics["reward_verbs"] == 0
    assert results[-1].metrics["rejected_turns"] == 0


def test_rejections_show_what_fits_and_count_no_verb():
    results = play(["open moon"], {"open moon": UNKNOWN}, max_turns=1)
    assert UNKNOWN in results[0].observation
    assert "`open OBJ`" in results[0].observation
    assert "`close OBJ`" not in results[0].observation
    assert results[0].metrics["rejected_turns"] == 1
    assert results[0].metrics["reward_verbs"] == 0


def test_an_ambiguous_request_is_answered_in_the_next_turn():
    script = {"pour cup into pot": QUESTION}
    results = play(["pour cup into pot", "1"], script, max_turns=2)
    assert QUESTION in results[0].observation
    assert results[1].metrics["reward_verbs"] == pytest.approx(0.05 / 6)
    assert results[1].metrics["rejected_turns"] == 1


def test_the_question_outlives_a_list_but_not_a_wrong_answer():
    script = {"pour a into b": QUESTION, "seven": "Unknown action."}
    results = play(["pour a into b", "objects", "0"], script, max_turns=3)
    assert results[-1].metrics["reward_verbs"] == pytest.approx(0.05 / 6)
    results = play(["pour a into b", "seven", "0"], script, max_turns=3)
    assert results[-1].metrics["reward_verbs"] == 0


def test_three_times_the_same_ends_it():
    results = play(["look", "wait", "Wait", "the  wait", "look"])
    assert len(results) == 4
    assert results[-1].ended_by == "repeated"
    assert not play(["wait", "wait", "look", "wait", "wait"])[-1].done


def test_completion_is_success_and_says_where_points_came_from():
    script = {
        "focus on cup": Answer("You focus on the cup.", 40, False),
        "wait": Answer("You wait.", 100, True),
    }
    results = play(["look", "focus on cup", "wait", "look"], script)
    assert len(results) == 3
    final = results[-1]
    assert (final.ended_by, final.success, final.score) == ("completed", True, 100)
    assert final.reward == pytest.approx(1 + 0.05 / 2)
    assert "Steps: 3. Score: 100 of 100 (solved)." in final.observation
    assert "Step 1, `focus on cup`: +40\nStep 2, `wait`: +60" in final.observation
    assert [result.score for result in results] == [0, 40, 100]


def test_a_wrong_focus_ends_it_with_the_points_so_far():
    script = {
        "open door": Answer("Open.", 20, False),
        "focus on fly": Answer("You focus on the fly.", -100, False),
    }
    final = play(["open door", "focus on fly"], script)[-1]
    assert (final.ended_by, final.success) == ("wrong_focus", False)
    assert final.reward == pytest.approx(0.2 * 0.5 + 0.05 / 3)
    assert "Score: 20 of 100 (partly solved)" in final.observation
    assert final.metrics["reward_stall"] == 0.5


def test_terms_are_logged_separately():
    final = play(["wait"], think=False, max_turns=1)[-1]
    assert set(final.metrics) == {"score", "rejected_turns"} | {
        f"reward_{name}" for name in ("base", "stall", "procedure", "think", "verbs")
    }
    assert final.metrics["reward_think"] == -0.1
    assert final.reward == pytest.approx(-0.1 + 0.05 / 6)


def test_a_budget_ends_it_from_outside():
    async def run():
        environment = ScienceWorldEnvironment(ScriptedPool({}), "boil", 0, "easy", 30)
        await environment.reset()
        await environment.step("<action>look</action>")
        final = await environment.conclude("response_budget")
        with pytest.raises(RuntimeError, match="ended"):
            await environment.step("<action>look</action>")
        with pytest.raises(RuntimeError, match="execution"):
            await environment.restore([])
        return final

    final = asyncio.run(run())
    assert (final.done, final.ended_by) == (True, "response_budget")
    assert "response_budget" in final.observation


def test_a_jvm_that_fails_ends_the_episode_with_its_reason():
    with pytest.raises(EpisodeError) as error:
        play(["look", "wait"], {"wait": JvmFailed("jvm_died", "step")})
    assert (error.value.reason, error.value.reward) == ("jvm_died", 0)


def test_a_start_is_tried_on_three_jvms():
    pool = ScriptedPool({"load": JvmFailed("jvm_deadline", "load")})
    with pytest.raises(EpisodeError) as error:
        play([], pool=pool)
    assert error.value.reason == "jvm_deadline"
    assert (pool.leased, pool.closed) == (3, 3)


def test_the_prompt_holds_commands_format_and_guidance():
    prompt = ScienceWorld(max_turns=17).system_prompt()
    for part in ("open OBJ", "teleport to PLACE", "focus on OBJ", "help:", "17 turns", "<action>"):
        assert part in prompt
    assert "teleport" not in ScienceWorld(simplification="").system_prompt()
    assert ScienceWorld().system_prompt("Boil first.").endswith("\n\nBoil first.")
