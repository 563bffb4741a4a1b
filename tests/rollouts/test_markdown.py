"""Rollouts as markdown, as TensorBoard's text plugin renders it."""

from record_doubles import record, retry
from tensorboard.plugin_util import markdown_to_safe_html

from rlds_jax.rollouts import markdown

GRADED = """\
## rollout 1-0/0

reward 0, ended by hole, advantage -1.000 (GRPO -0.750)

**turn 0**: advantage -0.500

    go 0

observation:

    saw 0

**turn 1**: advantage -1.500; pivot of planning

    go 1

observation:

    saw 1

| subtask | grade | pivot turn |
| --- | ---: | ---: |
| planning | 2 | 1 |
| tracking | - | - |

reflector, not valid (not_json):

    try
    again"""


def test_a_rollout_shows_turns_grades_pivots_and_judges():
    reflected = record("1-0/0", reflector={"text": "try\nagain", "error": "not_json"})
    assert markdown.rollout(reflected) == GRADED


def test_a_retry_shows_its_guidance_and_what_the_mask_removes():
    shown = markdown.rollout(retry("1-0/0r", "1-0/0"))
    assert shown.startswith("## retry of 1-0/0 from turn 1\n\nreward 1, ended by goal")
    assert "guidance:\n\n    Go the other way." in shown
    assert "**turn 0**: advantage -0.500; not in the loss\n" in shown
    assert "**turn 1**: advantage -1.500; pivot of planning\n" in shown


def test_a_turn_without_tokens_has_no_advantage():
    assert "**turn 1**\n" in markdown.rollout(
        record("1-0/0", turn_advantages=[0.5, None], grades=None, pivots=None)
    )


def test_a_pivot_past_the_last_turn_is_the_last():
    late = record("1-0/0", pivots={"planning": 9, "tracking": -1})
    assert markdown.pivot_turns(late) == {"planning": 1}
    cut = record("1-0/0", turn_advantages=[0.5, None], pivots={"planning": 9, "tracking": 0})
    assert markdown.pivot_turns(cut) == {"planning": 0, "tracking": 0}


def test_a_group_is_its_observation_and_every_rollout():
    group = [record("1-0/0"), retry("1-0/0r", "1-0/0")]
    rendered = markdown_to_safe_html(markdown.group(group))
    assert rendered.startswith("<h1>group 1-0, item board</h1>\n<pre><code>A B\n</code></pre>")
    assert rendered.count("<h2>") == 2
    assert rendered.count("<table>") == 2


def test_text_from_outside_is_never_markup():
    text = "# title\n| a |\n| - |\n```\n<b>bold</b>"
    shown = markdown.rollout(record("1-0/0", turns=1, grades=None, pivots=None) | {
        "turns": [{"action": text, "observation": text}]
    })  # fmt: skip
    rendered = markdown_to_safe_html(shown)
    assert rendered.count("<h1>") == rendered.count("<table>") == rendered.count("<b>") == 0
    assert rendered.count("# title\n| a |\n| - |\n```\n&lt;b&gt;bold&lt;/b&gt;") == 2


def test_the_sample_is_a_group_with_a_retry_where_there_is_one():
    plain, retried = [record("1-0/0")], [record("1-1/0"), retry("1-1/0r", "1-1/0")]
    assert markdown.sample([[], plain, retried]) is retried
    assert markdown.sample([[], plain]) is plain
