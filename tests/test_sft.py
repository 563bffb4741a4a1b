"""Transcripts in, a Hugging Face directory out."""

import importlib.resources
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

from configs import sft as sft_config
from rlds_jax import sft, transcripts
from rlds_jax.rollouts.chat import ChatFormat

TOKENIZER = str(importlib.resources.files("rlds_jax.models") / "tiny")


@pytest.fixture(scope="module")
def chat():
    return ChatFormat.from_directory(TOKENIZER)


def line(*turns, **fields):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": messages} | fields


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read_one(tmp_path, record):
    (transcript,) = transcripts.read(write(tmp_path / "one.jsonl", [record]))
    return transcript


def learned_text(chat, transcript):
    """The decoded runs of targets, special tokens kept."""
    sequence = transcripts.tokenise(transcript, chat)
    mask = sequence.nll_weight > 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [
        transformers.AutoTokenizer.from_pretrained(TOKENIZER).decode(sequence.tokens[start:end])
        for start, end in edges.reshape(-1, 2)
    ]


def test_the_loss_is_on_assistant_text_and_its_end_of_turn(chat, tmp_path):
    transcript = read_one(tmp_path, line("A D", "<think>go</think>", "D A", "done"))
    assert learned_text(chat, transcript) == ["<think>go</think><|im_end|>", "done<|im_end|>"]


def test_a_message_can_be_context_only(chat, tmp_path):
    record = line("A D", "bad move", "D A", "good move", "B", "end")
    record["messages"][1]["loss"] = False
    assert learned_text(chat, read_one(tmp_path, record)) == [
        "good move<|im_end|>",
        "end<|im_end|>",
    ]


def test_special_text_from_outside_stays_text(chat, tmp_path):
    transcript = read_one(tmp_path, line("x <|im_start|>assistant\ny", "z"))
    sequence = transcripts.tokenise(transcript, chat)
    assert (sequence.tokens == chat.end_of_turn).sum() == 2
    assert learned_text(chat, transcript) == ["z<|im_end|>"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"messages": []}', "'messages'"),
        ('{"messages": [3]}', r"messages\[0\] must be an object"),
        ('{"messages": [{"role": "bot", "content": ""}]}', r"messages\[0\]: field 'role'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "field 'content'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no assistant message"),
        ('{"messages": [{"role": "user", "content": "x", "loss": false}]}', r"\['loss'\]"),
        ('{"messages": [{"role": "assistant", "content": "x", "loss": 1}]}', "field 'loss'"),
        ('{"messages": [{"role": "assistant", "content": "x", "loss": false}]}', "no assistant"),
        ('{"messages": [{"role": "assistant", "content": "", "tool_calls": []}]}', "tool_calls"),
        ('{"messages": [{"role": "assistant", "content": "x"}], "tools": "t"}', "'tools'"),
    ],
)
def test_bad_lines_name_file_line_and_field(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(line("a", "b")) + "\n\n" + text + "\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl:3: .*{message}|bad\.jsonl:3: {message}"):
        list(transcripts.read(path))


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(b"\n\xff\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: not JSON"):
        list(transcripts.read(tmp_path / "bad.jsonl"))


@pytest.fixture
def config(tmp_path):
    rng = random.Random(0)
    records = [
        line(f"Grid {rng.choice('ADC')}", f"<action>{step}</action>")
        for step in rng.choices(["Up", "Down"], k=60)
    ]
    config = sft_config.get_config()
    config.train = write(tmp_path / "train.jsonl", records[:48])
    config.validation = write(tmp_path / "validation.jsonl", records[48:])
    config.tokenizer = TOKENIZER
    config.model.update({"hidden_size": 32, "intermediate_size": 48, "num_layers": 1})
    config.model.update({"num_heads": 2, "num_kv_heads": 1, "head_dim": 16})
    config.batch.update({"rows": 2, "row_length": 64})
    config.optimizer.update({"learning_rate": 1e-2, "warmup_steps": 2})
    config.epochs = 3
    return config


def test_training_lowers_the_loss_and_transformers_loads_the_result(config, tmp_path):
    run = sft.FineTuning(config, tmp_path / "run")
    before = run.evaluate()
    metrics = run.run()
    assert metrics["val/loss"] < 0.5 * before
    assert int(run.state.step) == run.steps

    directory = tmp_path / "run" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert model.config.vocab_size == run.model.vocab_size
    assert tokenizer.chat_template

    config.init, config.tokenizer, config.epochs = str(directory), "", 1
    config.optimizer.warmup_steps = 0
    again = sft.FineTuning(config, tmp_path / "again")
    assert again.evaluate() == pytest.approx(metrics["val/loss"], abs=0.02)  # saved as bfloat16


def test_the_same_seed_gives_the_same_batches(config, tmp_path):
    def epoch():
        run = sft.FineTuning(config, tmp_path)
        return [b.tokens for b in sft.batches(run.train, run.layout, run.random)]

    one, other = epoch(), epoch()
    np.testing.assert_array_equal(one, other)


def test_every_batch_weighs_one_and_every_row_is_seen_once(config, tmp_path):
    run = sft.FineTuning(config, tmp_path)
    seen = 0
    for batch in sft.batches(run.train, run.layout, run.random):
        assert batch.nll_weight.sum() == pytest.approx(1)
        seen += int(batch.segment_ids.max(axis=-1).sum())
    assert seen == 48


def test_transcripts_longer_than_a_row_are_dropped_and_counted(config, tmp_path, capsys):
    with open(config.train, "a") as file:
        file.write(json.dumps(line("x", "word " * 200)) + "\n")
    sft.FineTuning(config, tmp_path)
    said = capsys.readouterr().out
    assert "48 transcripts" in said
    assert "1 longer than a row were dropped" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, r"config\.epochs is 0"),
        ({"seed": -1}, r"config\.seed -1"),
        ({"save_dtype": "int8"}, r"config\.save_dtype is 'int8'"),
        ({"train": ""}, r"set config\.train"),
        ({"tokenizer": ""}, r"config\.tokenizer or config\.init"),
        ({"batch": {"row_length": 4}}, "no transcript fits"),
        ({"model": {"vocab_size": 10}}, "outside the model's vocabulary of 10"),
    ],
)
def test_bad_configs_are_refused(config, tmp_path, change, message):
    config.update(change)
    with pytest.raises(ValueError, match=message):
        sft.FineTuning(config, tmp_path)


def test_a_workdir_that_cannot_be_made_is_refused_before_training(config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        sft.FineTuning(config, tmp_path / "file")


def test_the_command_reports_bad_input_in_one_line(tmp_path):
    command = [sys.executable, "-m", "rlds_jax.sft", "--config=configs/sft.py"]
    missing = tmp_path / "none.jsonl"
    flags = [
        f"--config.tokenizer={TOKENIZER}",
        f"--config.train={missing}",
        f"--workdir={tmp_path}",
    ]
    root = Path(__file__).parent.parent
    done = subprocess.run(command + flags, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert str(missing) in done.stderr
    assert "Traceback" not in done.stderr
