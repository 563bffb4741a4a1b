import time

import pytest

from rlds_jax.tasks.think import outside_think


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("a<think>b</think>c", "ac"),
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("<THINK>a</Think>b", "b"),
        ("<think>a\nb</think>c", "c"),
        ("a<think>never closed", "a"),
        ("opened in the prompt</think>b", "b"),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("<think>a<think>b</think>still inside", ""),
        ("<th\u0131nk>a", "<th\u0131nk>a"),
        ("", ""),
    ],
)
def test_outside_think(text, expected):
    assert outside_think(text) == expected


def test_a_policy_that_only_opens_blocks_costs_little():
    started = time.perf_counter()
    assert outside_think("<think>" * 20_000) == ""
    assert time.perf_counter() - started < 1
