"""The credit figure: what it says is what the records say."""

import matplotlib.image
import pytest
from matplotlib.patches import Rectangle
from record_doubles import record, retry

from experiments.figures import credit, credit_layout, style
from experiments.figures.__main__ import main
from rlds_jax import run_files


def words(ids):
    return " ".join(f"w{id}" for id in ids)


def lines_of(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def patches_of(figure):
    """Face colours of the token patches by gid."""
    found = {}
    for patch in figure.axes[0].findobj(Rectangle):
        if patch.get_gid():
            found.setdefault(patch.get_gid(), set()).add(patch.get_facecolor())
    return found


def test_a_turn_has_its_tokens_advantages_pivots_and_mask():
    made = credit.prepare(retry("1-0/0r", "1-0/0"), words, decomposed=True)
    assert made.turns == [
        credit.Turn(["w0", "w1"], grpo=1.0, sdae=-0.5, masked=True, pivots=[]),
        credit.Turn(["w2", "w3"], grpo=1.0, sdae=-1.5, masked=False, pivots=["planning"]),
    ]
    assert made.title == "1-0/0r   reward 1 (goal)   retry of 1-0/0 from turn 1"
    assert made.grades == [("planning", 2, 1), ("tracking", None, None)]
    assert made.guidance == "Go the other way."


def test_a_run_of_grpo_has_no_column_of_sdae():
    made = credit.prepare(record("1-0/0", grades=None, pivots=None), words, decomposed=False)
    assert [turn.sdae for turn in made.turns] == [None, None]
    assert made.grades == []
    figure = credit_layout.draw("group", [made])
    assert patches_of(figure).keys() == {"0/grpo/0", "0/grpo/1"}
    assert not any("▼" in line for line in lines_of(figure))
    graded = credit.prepare(record("1-0/0"), words, decomposed=False)
    assert [turn.pivots for turn in graded.turns] == [[], []]


def test_a_model_without_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        credit.decoder(str(tmp_path))


def test_tokens_that_share_a_character_are_joined():
    pieces = {1: b"a", 2: b"\xe2\x82", 3: b"\xac", 4: b"\xe2"}

    def decode(ids):
        return b"".join(pieces[id] for id in ids).decode(errors="replace")

    assert credit.token_texts([1, 2, 3, 1], decode) == ["a", "€", "a"]
    assert credit.token_texts([1, 4], decode) == ["a", "\ufffd"]


def group(uid, *advantages, **fields):
    return [record(f"{uid}/{i}", advantage=a, **fields) for i, a in enumerate(advantages)]


def test_the_group_shown_has_both_signs_and_a_retry_that_helped():
    dull, signs = group("1-0", 1, 1), group("1-1", 1, -1)
    useless = [*group("1-2", 1, -1), retry("1-2/0r", "1-2/0", reward=0.0)]
    helped = [*group("1-3", 1, -1), retry("1-3/1r", "1-3/1")]
    ungraded = [*group("1-4", 1, -1, grades=None), retry("1-4/1r", "1-4/1")]
    everything = [*dull, *ungraded, *signs, *useless, *helped]
    assert credit.choose_group(everything) == helped
    assert credit.choose_group([*dull, *ungraded, *signs, *useless]) == useless
    assert credit.choose_group([*dull, *ungraded, *signs]) == signs
    assert credit.choose_group(everything, "1-0") == dull
    with pytest.raises(ValueError, match=r"--group is 9; this step has 1-0, 1-1"):
        credit.choose_group([*dull, *signs], "9")


def test_the_rollouts_shown_are_the_best_retry_its_original_and_the_extremes():
    originals = group("1-0", 0.5, -2, 2, 1)
    retries = [retry("1-0/0r", "1-0/0", reward=0.0), retry("1-0/1r", "1-0/1")]
    chosen = credit.choose_rollouts([*originals, *retries])
    assert [r["uid"] for r in chosen] == ["1-0/2", "1-0/0", "1-0/1", "1-0/1r"]
    alone = credit.choose_rollouts(group("1-0", 0.5, -2, 2, 1, 0))
    assert [r["uid"] for r in alone] == ["1-0/2", "1-0/3", "1-0/4", "1-0/1"]
    assert len(credit.choose_rollouts(originals[:1])) == 1


def test_tokens_wrap_break_and_show_their_newlines():
    piece = credit_layout.Piece
    assert credit_layout.wrap(["abc", "de", "f"], width=5) == [
        piece(0, 0, "abc"), piece(0, 3, "de"), piece(1, 0, "f"),
    ]  # fmt: skip
    assert credit_layout.wrap(["abcdefg"], width=3) == [
        piece(0, 0, "abc"), piece(1, 0, "def"), piece(2, 0, "g"),
    ]  # fmt: skip
    assert credit_layout.wrap(["a\nb"], width=5) == [piece(0, 0, "a↵"), piece(1, 0, "b")]
    assert credit_layout.wrap(["abc", "def", "ghi"], width=3, most=1) == [
        piece(0, 0, "abc"), piece(1, 0, "... 2 more tokens"),
    ]  # fmt: skip


def test_colours_are_the_advantages_on_one_symmetric_scale():
    rows = [record("1-0/0"), retry("1-0/0r", "1-0/0", turn_advantages=[-9.0, 2.0])]
    rollouts = [credit.prepare(r, words, decomposed=True) for r in rows]
    norm = credit_layout.scale(rollouts)
    assert (norm.vmin, norm.vmax) == (-2, 2)  # -9 is not in the loss
    colours = patches_of(credit_layout.draw("group", rollouts))
    for gid, value in {
        "0/grpo/0": -0.75, "0/grpo/1": -0.75, "0/sdae/0": -0.5, "0/sdae/1": -1.5,
        "1/grpo/1": 1.0, "1/sdae/1": 2.0,
    }.items():  # fmt: skip
        assert colours[gid] == {style.CREDIT(norm(value))}, gid
    (masked,) = colours["1/sdae/0"]
    assert colours["1/grpo/0"] == {masked}
    assert masked[0] == masked[1] == masked[2]  # grey


def test_the_figure_names_pivots_grades_and_guidance():
    rollouts = [credit.prepare(retry("1-0/0r", "1-0/0"), words, decomposed=True)]
    lines = lines_of(credit_layout.draw("group 1-0", rollouts))
    assert lines.count("▼ planning") == 1
    assert f"{'planning':<25} ■■□□□   turn 1" in lines
    assert f"{'tracking':<25} missing -" in lines
    assert "Go the other way." in lines
    assert {"+1.00", "-0.50", "-1.50"} <= set(lines)


def test_dollars_are_no_mathematics():
    rollouts = [credit.prepare(record("1-0/0"), lambda ids: "$x^2$ ", decomposed=True)]
    figure = credit_layout.draw("group", rollouts)
    figure.canvas.draw()
    assert r"\$x^2\$ " in lines_of(figure)


def test_the_figure_of_a_run_shows_its_text(tiny_run, tmp_path):
    out = tmp_path / "deep" / "credit.png"
    main(["credit", f"--workdir={tiny_run}", "--step=2", f"--out={out}"])
    pixels = matplotlib.image.imread(out)
    assert pixels.std() > 0.05
    records = run_files.rollouts(tiny_run, 2)
    decode = credit.decoder(run_files.config(tiny_run)["model"]["path"])
    for row in records:
        for turn, ids in zip(row["turns"], row["turn_tokens"], strict=True):
            text = "".join(credit.token_texts(ids, decode))
            assert text.removesuffix("<|im_end|>") == turn["action"]


def test_figures_go_to_the_workdir_by_default(tiny_run, capsys):
    main(["credit", f"--workdir={tiny_run}", "--step=1"])
    path = capsys.readouterr().out.removeprefix("wrote ").strip()
    assert path.startswith(str(tiny_run / "figures" / "credit-1-"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step=3"], "no rollouts of step 3"),
        (["--step=1", "--group=9"], "--group is 9"),
        (["--step=1", "--workdir=/nonexistent"], "config.json"),
    ],
)
def test_what_is_not_there_is_named(flags, message, tiny_run, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["credit", f"--workdir={tiny_run}", *flags])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
