"""The GPU check at a tiny size, on this machine's CPU."""

import math

import batch_doubles as doubles
import jax

from experiments.gpu_check import Setting, Update, disagreements, row


def test_a_setting_runs_and_one_that_differs_is_named():
    setting = Setting.parse("64,dense,none")
    result = Update(doubles.MODEL, setting, 2, jax.devices()[:1], "float32").steps(2)
    assert "tokens/s/device" in row(result)
    assert result["planned_memory"] > 0
    assert math.isfinite(result["loss"])
    assert result["gradient_norm"] > 0

    same = (Setting.parse("64,pallas,full"), result | {"loss": 1.001 * result["loss"]})
    other = (Setting.parse("64,blockwise,full"), result | {"gradient_norm": 9.0})
    shorter = (Setting.parse("32,dense,none"), result | {"loss": 7.0})
    assert disagreements([(setting, result), same, shorter]) == []
    (wrong,) = disagreements([(setting, result), same, other])
    assert "blockwise" in wrong
    assert "gradient_norm" in wrong
