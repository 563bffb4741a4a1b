"""Event files, read back with TensorBoard's own readers."""

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data
from tensorboard.plugins.text.text_plugin import text_array_to_html
from tensorboard.util import tensor_util

from rlds_jax.events import Events, flat


def read(directory):
    events = EventAccumulator(str(directory))
    events.Reload()
    return events


def plugin(events, tag):
    return events.SummaryMetadata(tag).plugin_data.plugin_name


def test_a_histogram_holds_every_value(tmp_path):
    events = Events(tmp_path)
    values = np.array([[-1.0, 0.0], [0.0, 3.0]], np.float32)
    events.histogram(4, "sdae/token_advantage", values)
    events.close()
    events = read(tmp_path)
    assert plugin(events, "sdae/token_advantage") == "histograms"
    (event,) = events.Tensors("sdae/token_advantage")
    left, right, count = tensor_util.make_ndarray(event.tensor_proto).T
    assert (event.step, left[0], right[-1], count.sum()) == (4, -1, 3, 4)
    assert count[(left <= 0) & (right > 0)] == 2


def test_a_histogram_of_nothing_is_empty(tmp_path):
    events = Events(tmp_path)
    events.histogram(1, "sdae/token_advantage", np.array([], np.float32))
    events.close()
    (event,) = read(tmp_path).Tensors("sdae/token_advantage")
    assert not tensor_util.make_ndarray(event.tensor_proto).any()


def test_a_text_is_shown_as_markdown(tmp_path):
    events = Events(tmp_path)
    events.text(2, "rollouts/sample", "# turn 0\n\n    a lone \ud800 surrogate")
    events.close()
    events = read(tmp_path)
    assert plugin(events, "rollouts/sample") == "text"
    (event,) = events.Tensors("rollouts/sample")
    html = text_array_to_html(tensor_util.make_ndarray(event.tensor_proto), True)
    assert "<h1>turn 0</h1>" in html
    assert "a lone ? surrogate" in html


def test_hparams_are_the_fields_of_the_config(tmp_path):
    events = Events(tmp_path)
    events.hparams({"steps": 3, "rollout": {"condition": "rlds", "contrast": False}})
    events.close()
    events = read(tmp_path)
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = parse_session_start_info_plugin_data(content).hparams
    assert found.keys() == {"steps", "rollout.condition", "rollout.contrast"}
    assert found["steps"].number_value == 3
    assert found["rollout.condition"].string_value == "rlds"
    assert found["rollout.contrast"].bool_value is False


def test_flat_fields():
    nested = {"a": {"b": {"c": 0.5}, "size": (4, 4), "absent": None}, "on": True}
    assert flat(nested) == {"a.b.c": 0.5, "a.size": "(4, 4)", "on": True}
