"""Topologies by name; what needs a compiler's plugin is not here."""

import pytest

from rlds_jax import topology


@pytest.mark.parametrize(
    ("text", "devices", "hosts", "shape"),
    [
        ("h100:8", 8, 1, None),
        ("h100:16", 16, 2, None),
        ("a100-80gb:4", 4, 1, None),
        ("v5e:4x4", 16, 4, "4x4"),
        ("tpu v5p:2x2x2", 8, 2, "2x2x2"),
    ],
)
def test_names_are_read(text, devices, hosts, shape):
    found = topology.parse(text)
    assert (found.devices, found.hosts, found.shape) == (devices, hosts, shape)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b300:8", "'b300' is unknown"),
        ("h100", "such as h100:8"),
        ("h100:2x4", "such as h100:8"),
        ("v5e:16", "such as v5e:4x4"),
        ("h100:12", "whole hosts of 8"),
        ("h100:0", "neither part of one host"),
    ],
)
def test_others_are_refused_with_an_example(text, message):
    with pytest.raises(ValueError, match=message):
        topology.parse(text)


def test_a_missing_plugin_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RuntimeError, match=r"libtpu.*pip install 'rlds_jax\[plan\]'"):
        topology.devices(topology.parse("v5e:2x2"))


def test_the_checks_of_cudnn_answer_for_the_absent_chip_and_come_back():
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    before = kernels.check_compute_capability
    with topology.absent(topology.CHIPS["a100-80gb"]):
        assert kernels.check_compute_capability("8.0")
        assert not kernels.check_compute_capability("9.0")
    assert kernels.check_compute_capability is before
