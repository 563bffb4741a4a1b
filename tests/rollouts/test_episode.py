"""One episode against a scripted engine: tokens, budgets, endings, retries."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from rollout_doubles import CHATML, NOT_SPECIAL, SPECIAL, Corridor, build_tokenizer, make_context

from rlds_jax.rollouts.context import RolloutKey
from rlds_jax.rollouts.engines.base import request_seed
from rlds_jax.rollouts.episode import RolloutDropped, run_original, run_retry
from rlds_jax.tasks.base import EpisodeError, Item, StepResult

KEY = RolloutKey(step=5, slot=2, rollout=1)
ITEM = Item("7", {"length": 3})


def play(context, item=ITEM):
    events = Counter()
    return asyncio.run(run_original(context, KEY, item, events)), events


def retry(context, original, start, guidance="go right", item=ITEM):
    events = Counter()
    work = run_retry(context, KEY, item, original, start, guidance, events)
    return asyncio.run(work), events


def always(text):
    return lambda request: text


def walk(*actions):
    """Answers turn t with actions[t]."""
    return lambda request: actions[request.turn]


def turn_text(context, trajectory, turn):
    return context.chat._full.decode(
        trajectory.tokens[trajectory.turn_ids == turn].tolist(), skip_special_tokens=False
    )


def whole_text(context, trajectory):
    return context.chat._full.decode(trajectory.tokens.tolist(), skip_special_tokens=False)


def test_an_episode_is_one_flat_record(tokenizer):
    context = make_context(tokenizer, walk("right", "hmm", "right", "right"))
    t, events = play(context)
    assert whole_text(context, t) == (
        "<|im_start|>system\nWalk to the end.<|im_end|>\n<|im_start|>user\ncell 0<|im_end|>\n"
        "<|im_start|>assistant\nright<|im_end|>\n<|im_start|>user\ncell 1<|im_end|>\n"
        "<|im_start|>assistant\nhmm<|im_end|>\n<|im_start|>user\ncell 1<|im_end|>\n"
        "<|im_start|>assistant\nright<|im_end|>\n<|im_start|>user\ncell 2<|im_end|>\n"
        "<|im_start|>assistant\nright<|im_end|>"
    )
    actions = [turn_text(context, t, i) for i in range(4)]
    assert actions == [f"{a}<|im_end|>" for a in ("right", "hmm", "right", "right")]
    assert t.turns[-1] == ("right", "arrived")
    assert (t.reward, t.success, t.ended_by) == (1.0, True, "arrived")
    assert t.metrics == {"tools/calls": 4}
    assert (t.uid, t.group, t.item_id) == ("5-2/1", "5-2", "7")
    sampled = t.turn_ids >= 0
    assert (t.logprobs[sampled] < 0).all()
    assert (t.logprobs[~sampled] == 0).all()
    assert set(t.weight_version[sampled]) == {7}
    assert set(t.weight_version[~sampled]) == {-1}
    assert t.prompt_length == np.flatnonzero(sampled)[0]
    assert not events
    assert context.task.closed == 1


def test_each_request_continues_the_record_with_its_own_seed(tokenizer):
    context = make_context(tokenizer, always("right"))
    t, _ = play(context)
    starts = [int(np.argmax(t.turn_ids == turn)) for turn in range(3)]
    for turn, (request, start) in enumerate(zip(context.engine.requests, starts, strict=True)):
        assert request.prompt == t.tokens[:start].tolist()
        assert request.seed == request_seed(3, 5, 2, 1, "actor", turn)
        assert request.temperature == 0.7
    limits = [request.max_tokens for request in context.engine.requests]
    assert limits == [4096 - (start - t.prompt_length) for start in starts]


def test_sampled_ids_are_kept_whatever_they_decode_to(tokenizer):
    """The ids of a turn are not those its text encodes to, and special ids are ordinary."""
    vision = tokenizer.convert_tokens_to_ids("<|vision_pad|>")
    pad = tokenizer.pad_token_id
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "right"]
    ids = [pad, vision, *letters, tokenizer.eos_token_id]
    assert tokenizer.encode("right", add_special_tokens=False) != letters
    context = make_context(tokenizer, always(ids))
    t, _ = play(context)
    assert t.tokens[t.turn_ids == 0].tolist() == ids
    assert t.turns[0].action == "<|vision_pad|>right"


def test_bytes_of_a_character_over_two_turns_and_two_tokens(tokenizer):
    first, second = tokenizer.encode("é", add_special_tokens=False)
    context = make_context(tokenizer, walk([first, second], [first], "right", "right", "right"))
    t, _ = play(context)
    assert [turn.action for turn in t.turns[:2]] == ["é", "\ufffd"]
    assert t.tokens[t.turn_ids == 1].tolist() == [first]


@pytest.mark.parametrize("added", SPECIAL + NOT_SPECIAL)
def test_added_tokens_in_observations_stay_text(tokenizer, added):
    def step(walk, text):
        return StepResult(f"see {added} here") if text == "look" else None

    context = make_context(
        tokenizer, walk("look", "right", "right", "right"), task=Corridor(step=step)
    )
    t, _ = play(context, Item("7", {"length": 3, "first": f"start {added} now"}))
    added_id = tokenizer.convert_tokens_to_ids(added)
    plain = make_context(tokenizer, walk("hmm", "right", "right", "right"))
    reference, _ = play(plain)
    assert (t.tokens == added_id).sum() == (reference.tokens == added_id).sum()
    assert f"see {added} here" in whole_text(context, t)
    assert f"start {added} now" in whole_text(context, t)


def test_empty_completion_is_a_turn(tokenizer):
    context = make_context(tokenizer, walk("", "right", "right", "right"))
    t, _ = play(context)
    assert t.turns[0] == ("", "cell 0")
    assert t.tokens[t.turn_ids == 0].tolist() == [context.chat.end_of_turn]


def test_completion_without_tokens_drops_the_row(tokenizer):
    with pytest.raises(RolloutDropped) as error:
        play(make_context(tokenizer, always([])))
    assert error.value.reason == "no_tokens"


def test_turn_cut_by_its_own_limit_gets_an_unsampled_end(tokenizer):
    context = make_context(tokenizer, always("right right right"), max_turn_tokens=3)
    t, _ = play(context)
    cut = t.tokens[t.turn_ids == 0]
    assert len(cut) == 3
    assert context.chat.end_of_turn not in cut
    after = int(np.flatnonzero(t.turn_ids == 0)[-1]) + 1
    assert t.tokens[after] == context.chat.end_of_turn
    assert t.turn_ids[after] == -1
    assert context.engine.requests[0].max_tokens == 3


def response(t):
    return len(t.tokens) - t.prompt_length


def test_completion_cut_by_the_budget_ends_the_episode(tokenizer):
    context = make_context(tokenizer, always("left it be " * 30), max_response_tokens=40)
    t, _ = play(context)
    assert t.ended_by == "response_budget"
    assert response(t) == 40
    assert t.turns[-1].observation == "cut off"
    assert len(t.turns) == 1


def test_stop_token_exactly_at_the_budget(tokenizer):
    ids = tokenizer.encode("left right<|im_end|>", add_special_tokens=False)
    context = make_context(tokenizer, always(ids), max_response_tokens=len(ids))
    t, _ = play(context)
    assert t.tokens[t.turn_ids == 0].tolist() == ids
    assert t.ended_by == "response_budget"


def test_last_turn_may_use_the_budget_up_and_still_win(tokenizer):
    ids = tokenizer.encode("right<|im_end|>", add_special_tokens=False)
    context = make_context(tokenizer, always(ids), max_response_tokens=len(ids))
    t, _ = play(context, Item("7", {"length": 1}))
    assert (t.ended_by, t.reward) == ("arrived", 1.0)


@pytest.mark.parametrize(("spare", "turns"), [(0, 2), (-1, 1)])
def test_budget_rule_is_a_third_of_the_characters_plus_twenty(tokenizer, spare, turns):
    observation = "hole " * 24  # 120 characters, far fewer tokens: 40 + 20 are asked for
    ids = tokenizer.encode("look<|im_end|>", add_special_tokens=False)

    def step(walk, text):
        return StepResult(observation)

    task = Corridor(step=step)
    limit = len(ids) + 60 + spare
    context = make_context(tokenizer, always(ids), task=task, max_response_tokens=limit)
    suffix = context.chat.suffix(ids, observation, "user")
    assert len(suffix) < 60
    t, _ = play(context)
    assert t.ended_by == "response_budget"
    assert len(t.turns) == turns


def test_response_never_exceeds_its_limit_when_characters_make_many_tokens(tokenizer):
    def step(walk, text):
        return StepResult("€" * 30)  # three tokens a character

    context = make_context(
        tokenizer, always("look"), task=Corridor(step=step), max_response_tokens=60
    )
    t, _ = play(context)
    assert t.ended_by == "response_budget"
    assert response(t) <= 60
    assert len(t.turns) == 1


def test_prompt_over_its_limit_names_the_item(tokenizer):
    context = make_context(tokenizer, always("right"), max_prompt_tokens=10)
    with pytest.raises(RolloutDropped, match=r"item 7: .*max_prompt_tokens=10") as error:
        play(context)
    assert error.value.reason == "prompt_too_long"
    assert context.task.closed == 1


def failing_step(walk, text):
    if text == "crash":
        raise EpisodeError("jvm", reward=0.25)


def test_environment_error_stays_with_its_reward(tokenizer):
    context = make_context(tokenizer, walk("right", "crash"), task=Corridor(step=failing_step))
    t, events = play(context)
    assert (t.reward, t.success, t.ended_by) == (0.25, False, "env_error")
    assert t.turns[-1].action == "crash"
    assert events == {"env_error/jvm": 1}
    assert context.task.closed == 1


def test_environment_error_may_drop_the_row(tokenizer):
    task = Corridor(step=failing_step)
    context = make_context(tokenizer, always("crash"), task=task, env_error="drop")
    with pytest.raises(RolloutDropped) as error:
        play(context)
    assert error.value.reason == "env_error"


def test_environment_is_closed_when_the_engine_fails(tokenizer):
    context = make_context(tokenizer, always(OSError("engine")))
    with pytest.raises(OSError, match="engine"):
        play(context)
    assert context.task.closed == 1


# Retries.


def original_walk(tokenizer, task=None, **config):
    """right, hmm, left, left: falls off in turn 3."""
    context = make_context(tokenizer, walk("right", "hmm", "left", "left"), task=task, **config)
    return context, play(context)[0]


def resume(context, answer):
    context.engine.answer = answer
    context.engine.requests.clear()


@pytest.mark.parametrize("replay", ["execute", "restore"])
def test_retry_replays_the_original_tokens(tokenizer, replay):
    context, original = original_walk(tokenizer, Corridor(replay=replay))
    resume(context, always("right"))
    t, events = retry(context, original, 2)
    assert (t.retry_from, t.parent, t.uid) == (2, original.uid, "5-2/1r")
    assert (t.guidance, t.reward) == ("go right", 1.0)
    for turn in (0, 1):
        mine, theirs = t.turn_ids == turn, original.turn_ids == turn
        for field in ("tokens", "logprobs", "weight_version"):
            assert (getattr(t, field)[mine] == getattr(original, field)[theirs]).all()
    assert [turn.action for turn in t.turns] == ["right", "hmm", "right", "right"]
    assert t.prompt_length == original.prompt_length
    assert len(context.engine.requests) == 2
    assert context.engine.requests[0].seed == request_seed(3, 5, 2, 1, "retry", 2)
    assert t.sampled_tokens == sum((t.turn_ids == turn).sum() for turn in (2, 3))
    assert not events
    if replay == "restore":
        assert context.task.restored == [original.turns[:2]]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_guidance_comes_just_before_the_observation_which_appears_once(tokenizer, role):
    context, original = original_walk(tokenizer, Corridor(observation_role=role))
    resume(context, always("right"))
    t, _ = retry(context, original, 2)
    start = int(np.argmax(t.turn_ids == 2))
    before = context.chat._full.decode(t.tokens[:start].tolist(), skip_special_tokens=False)
    opened = "user\n<tool_response>\ncell 1\n</tool_response>" if role == "tool" else "user\ncell 1"
    assert before.endswith(
        f"<|im_start|>assistant\nhmm<|im_end|>\n<|im_start|>system\ngo right<|im_end|>\n"
        f"<|im_start|>{opened}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert before.count("cell 1") == 2  # the observations of turns 1 and 2
    assert "go right" not in before[: before.index("hmm")]


def test_guidance_inside_the_user_turn_where_the_template_needs_it(tokenizer):
    template = CHATML.replace(
        "{%- else %}{{- '<|im_start|>' + m.role",
        "{%- elif m.role == 'system' %}{{ raise_exception('no') }}"
        "{%- else %}{{- '<|im_start|>' + m.role",
    )
    context, original = original_walk(build_tokenizer(template))
    resume(context, always("right"))
    t, _ = retry(context, original, 1)
    assert "<|im_start|>user\ngo right\n\ncell 1<|im_end|>" in whole_text(context, t)


def test_retry_from_zero_has_guidance_in_the_system_prompt(tokenizer):
    context, original = original_walk(tokenizer)
    resume(context, always("right"))
    t, events = retry(context, original, 0)
    assert whole_text(context, t).startswith(
        "<|im_start|>system\nWalk to the end.\ngo right<|im_end|>\n<|im_start|>user\ncell 0"
    )
    assert t.retry_from == 0
    assert t.prompt_length > original.prompt_length
    assert not events


def test_guidance_is_cut_and_outside_prompt_and_response_limits(tokenizer):
    advice = "go right and on " * 100
    context, original = original_walk(tokenizer, max_guidance_tokens=30)
    limit = original.prompt_length
    for start in (0, 2):
        context = make_context(
            tokenizer, always("right"), max_guidance_tokens=30, max_prompt_tokens=limit
        )
        t, _ = retry(context, original, start, advice)
        assert t.success
        assert t.guidance == context.chat.truncate(advice, 30)
        replayed = int(np.argmax(original.turn_ids == start)) - limit
        assert context.engine.requests[0].max_tokens == 4096 - replayed
        assert 25 <= len(context.chat.encode_text(t.guidance)) <= 30


def test_replay_that_diverges_starts_over_from_turn_zero(tokenizer):
    task = Corridor(drift=[1])  # the second environment observes something else after a turn
    context, original = original_walk(tokenizer, task)
    resume(context, always("right"))
    t, events = retry(context, original, 2)
    assert events == {"replay_diverged": 1}
    assert t.retry_from == 0
    assert [turn.action for turn in t.turns] == ["right"] * 3
    assert "Walk to the end.\ngo right" in whole_text(context, t)
    assert "system\ngo right" not in whole_text(context, t)
    assert task.opened == task.closed == 3


def test_another_first_observation_is_a_divergence_too(tokenizer):
    context, original = original_walk(tokenizer)
    resume(context, always("right"))
    t, events = retry(context, original, 1, item=Item("7", {"length": 3, "first": "elsewhere"}))
    assert events == {"replay_diverged": 1}
    assert (t.retry_from, t.initial_observation) == (0, "elsewhere")


def test_turn_budget_counts_the_replayed_prefix(tokenizer):
    context = make_context(tokenizer, always("hmm"))
    original, _ = play(context)
    assert (len(original.turns), original.ended_by) == (6, "max_turns")
    t, _ = retry(context, original, 4)
    assert (len(t.turns), t.ended_by) == (6, "max_turns")


def test_response_budget_counts_the_replayed_prefix(tokenizer):
    _context, original = original_walk(tokenizer)
    used = int(np.argmax(original.turn_ids == 3)) - original.prompt_length
    tight = make_context(tokenizer, always("hmm " * 50), max_response_tokens=used + 5)
    t, _ = retry(tight, original, 3)
    assert tight.engine.requests[0].max_tokens == 5
    assert t.ended_by == "response_budget"
