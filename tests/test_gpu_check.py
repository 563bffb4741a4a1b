"""The GPU check at a tiny size, on this machine's CPU."""

import batch_doubles as doubles
import jax

from experiments.gpu_check import Setting, Update, disagreements, row


def test_kernels_and_policies_agree_and_a_difference_is_named():
    settings = [Setting(64, "dense", "none"), Setting(64, "blockwise", "full")]
    results = [
        (setting, Update(doubles.MODEL, setting, 2, jax.devices()[:1], "float32").steps(2))
        for setting in settings
    ]
    assert disagreements(results) == []
    assert "tokens/s/device" in row(results[0][1])
    assert results[0][1]["planned_memory"] > 0
    results[1][1]["loss"] += 1
    (wrong,) = disagreements(results)
    assert "blockwise" in wrong
    assert "loss" in wrong
