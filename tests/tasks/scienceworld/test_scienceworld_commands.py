"""Action tags, verbs, and what the simulator's answers mean."""

import pytest

from rlds_jax.tasks.scienceworld import commands


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<action>look around</action>", "look around"),
        ("<action>wait</action> no: <action> go  to\n kitchen </action>", "go to kitchen"),
        ("<ACTION>Look Around</Action>", "Look Around"),
        ("<think><action>wait</action></think>", None),
        ("<think>hm</think><action>wait</action><think><action>eat x</action></think>", "wait"),
        ("opened by the template</think><action>wait</action>", "wait"),
        ("<think>never closed <action>wait</action>", None),
        ("<action></action>", ""),
        ("<action>wait", None),
        ("look around", None),
        ("", None),
    ],
)
def test_the_last_tag_outside_think_counts(text, action):
    assert commands.parse_action(text) == action


@pytest.mark.parametrize(
    ("text", "thinks"),
    [
        ("<think>a</think><action>wait</action>", True),
        ("opened by the template</think><action>wait</action>", True),
        ("<think>never closed", True),
        ("<action>wait</action>", False),
        ("I think <action>wait</action>", False),
    ],
)
def test_think_blocks_are_seen(text, thinks):
    assert commands.thinks(text) == thinks


@pytest.mark.parametrize(
    ("action", "verb"),
    [
        ("look around", "look around"),
        ("look", "look around"),
        ("examine the orange", "look at"),
        ("look in fridge", "look in"),
        ("Turn On stove", "activate"),
        ("turn off stove", "deactivate"),
        ("move orange to bowl", "move"),
        ("move to kitchen", "go"),
        ("move through door to kitchen", "go"),
        ("walk to kitchen", "go"),
        ("put orange in bowl", "move"),
        ("put down orange", "put down"),
        ("take the orange", "pick up"),
        ("use thermometer on water", "use"),
        ("teleport kitchen", "teleport"),
        ("focus orange", "focus"),
        ("wait1", "wait"),
        ("wait", "wait"),
        ("waiting", None),
        ("grab orange", None),
        ("0", None),
        ("", None),
    ],
)
def test_verbs(action, verb):
    assert commands.verb(action) == verb


@pytest.mark.parametrize("action", ["reset task", "Reset  the TASK", "a reset an task"])
def test_every_spelling_of_reset_is_known(action):
    assert commands.is_reset(action)
    assert not commands.is_reset(action + " now")


@pytest.mark.parametrize(
    ("observation", "verdict"),
    [
        ("No known action matches that input.", "unknown"),
        ("Unknown action.  Type 'help' for a list of actions", "unknown"),
        ("Ambiguous request: Please enter the number", "ambiguous"),
        ("The door is already open.", "accepted"),
    ],
)
def test_verdicts(observation, verdict):
    assert commands.verdict(observation) == verdict


def test_simplifications_change_what_is_available():
    def verbs(simplification, electrical):
        return {c.verb for c in commands.available(simplification, electrical)}

    everything = {c.verb for c in commands.COMMANDS}
    assert verbs("easy", True) == everything
    assert verbs("easy", False) == everything - {"connect", "disconnect"}
    assert verbs("", False) == everything - {"teleport"}
    assert verbs("teleportAction,openDoors", False) == everything
    assert verbs("noElectricalAction", False) == everything - {"teleport", "connect", "disconnect"}


def test_a_rejection_shows_what_fits():
    known = commands.available("easy", electrical=False)
    assert commands.that_fit("pick orange", known) == ["pick up OBJ"]
    assert commands.that_fit("take the moon", known) == ["pick up OBJ"]
    assert commands.that_fit("look behind sofa", known) == [
        "look around",
        "look at OBJ",
        "look in OBJ",
    ]
    assert commands.that_fit("dance", known) == [c.template for c in known]
    assert commands.that_fit("connect wire to bulb", known) == [c.template for c in known]


def test_experimental_verbs_are_verbs():
    assert {command.verb for command in commands.COMMANDS} >= commands.EXPERIMENTAL
    templates = [commands.verb(command.template) for command in commands.COMMANDS]
    assert templates == [command.verb for command in commands.COMMANDS]
