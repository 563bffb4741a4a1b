"""Traces of steps."""

import jax
import jax.numpy as jnp
import pytest

from rlds_jax import profiling


def test_steps_are_read():
    assert list(profiling.parse_steps("10:12")) == [10, 11, 12]
    assert not profiling.parse_steps("")


@pytest.mark.parametrize("text", ["10", "0:2", "3:2", "a:b", "1:2:3"])
def test_others_are_refused(text):
    with pytest.raises(ValueError, match=r"profile_steps is .* such as 10:12"):
        profiling.parse_steps(text)


def test_a_chosen_step_leaves_a_trace_where_tensorboard_looks(tmp_path):
    for step in (1, 2):
        with profiling.trace(step, range(2, 3), tmp_path):
            jax.block_until_ready(jnp.ones((64, 64)) @ jnp.ones((64, 64)))
    (found,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(found)).planes
    events = {event.name for plane in planes for line in plane.lines for event in line.events}
    assert "train" in events
