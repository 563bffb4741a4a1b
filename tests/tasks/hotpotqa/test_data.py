"""Rows in the dataset's schema, made here, loaded by `datasets` from a local directory."""

import datasets
import pytest

from rlds_jax.tasks.hotpotqa.data import load_items
from rlds_jax.tasks.hotpotqa.task import HotpotQA

CARD = """\
---
configs:
- config_name: distractor
  data_files:
  - split: train
    path: distractor/train-*.parquet
  - split: validation
    path: distractor/validation-*.parquet
---
"""


def row(i, **changes):
    fields = {
        "id": f"q{i}",
        "question": f"Which town has number {i}?",
        "answer": f"Town {i}",
        "type": "bridge",
        "level": "easy",
        "supporting_facts": {"title": ["Town"], "sent_id": [0]},
        "context": {"title": ["Town"], "sentences": [["A town.", " It has a number."]]},
    }
    return fields | changes


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a dataset directory of the hub's layout; validation is train where not given."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def write(train, validation=None):
        folder = tmp_path / "data" / "distractor"
        folder.mkdir(parents=True)
        for split, rows in (("train", train), ("validation", validation)):
            path = folder / f"{split}-00000-of-00001.parquet"
            datasets.Dataset.from_list(rows or train).to_parquet(path)
        (folder.parent / "README.md").write_text(CARD)
        return str(folder.parent)

    return write


def test_train_is_a_seeded_subset_and_validation_a_fixed_slice(write):
    path = write([row(i) for i in range(20)], [row(i) for i in range(100, 108)])
    train = load_items(path, "train", 12, seed=0)
    assert len({item.id for item in train}) == 12
    assert train == load_items(path, "train", 12, seed=0)
    assert train != load_items(path, "train", 12, seed=1)
    assert [item.id for item in load_items(path, "train", 99, seed=0)][:12] == [i.id for i in train]
    validation = load_items(path, "validation", 3, seed=1)
    assert [item.id for item in validation] == ["q100", "q101", "q102"]
    question = {"question": "Which town has number 100?", "answers": ["Town 100"]}
    assert validation[0].data == question
    task = HotpotQA(data_path=path, train_items=5, validation_items=500)
    assert (len(task.items("train")), len(task.items("validation"))) == (5, 8)


def test_an_answer_may_be_a_list_of_aliases(write):
    path = write([row(0, answer=["New York", "NYC"])])
    assert load_items(path, "train", 1, 0)[0].data["answers"] == ["New York", "NYC"]


@pytest.mark.parametrize("field", ["question", "answer", "id"])
@pytest.mark.parametrize("value", [None, " "])
def test_a_bad_row_is_named_with_its_field(write, field, value):
    path = write([row(0), row(1, **{field: value if field != "id" else None})])
    with pytest.raises(ValueError, match=f"train row 1: the field {field}"):
        load_items(path, "train", 9, 0)


def test_a_missing_field_is_named(write):
    rows = [{k: v for k, v in row(i).items() if k != "answer"} for i in range(2)]
    with pytest.raises(ValueError, match=r"no field .'answer'."):
        load_items(write(rows), "train", 2, 0)


def test_a_path_that_holds_no_dataset_is_named(tmp_path):
    with pytest.raises(ValueError, match="data_path"):
        load_items(str(tmp_path), "train", 1, 0)
