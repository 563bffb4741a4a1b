"""Records of rollouts.jsonl, for the tests of what is made from them."""


def record(uid, turns=2, **fields):
    """A graded original of `turns` turns of two tokens each; `fields` replace what they name."""
    made = {
        "uid": uid,
        "group": uid.split("/")[0],
        "item": "board",
        "parent": None,
        "retry_from": None,
        "guidance": None,
        "reward": 0.0,
        "ended_by": "hole",
        "initial_observation": "A B",
        "turns": [{"action": f"go {i}", "observation": f"saw {i}"} for i in range(turns)],
        "turn_tokens": [[2 * i, 2 * i + 1] for i in range(turns)],
        "turn_advantages": [-0.5 - i for i in range(turns)],
        "advantage": -1.0,
        "grpo_advantage": -0.75,
        "masked_turns": 0,
        "grades": {"planning": 2, "tracking": None},
        "pivots": {"planning": 1, "tracking": None},
    }
    return made | fields


def retry(uid, parent, **fields):
    """A successful retry of `parent` from turn 1."""
    won = {"reward": 1.0, "ended_by": "goal", "advantage": 1.5, "grpo_advantage": 1.0}
    told = {"parent": parent, "retry_from": 1, "masked_turns": 1, "guidance": "Go the other way."}
    return record(uid, **{**won, **told, **fields})
