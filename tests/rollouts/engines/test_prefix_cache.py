import hypothesis
import hypothesis.strategies as st
import pytest

from rlds_jax.rollouts.engines.prefix_cache import Lease, PrefixCache

PAGE = 4


def fill(cache, tokens, max_tokens=1, sampled=()):
    """Acquires, computes everything and releases; returns what was found."""
    lease = cache.acquire(tokens, max_tokens)
    assert isinstance(lease, Lease)
    everything = [*tokens, *sampled]
    cache.release(lease, everything, len(everything) - 1)
    return lease


def test_same_prompt_is_found_whole_but_for_its_last_token():
    cache = PrefixCache(20, PAGE)
    assert fill(cache, list(range(10))).cached == 0
    assert fill(cache, list(range(10))).cached == 9


def test_next_turn_finds_prompt_and_completion():
    cache = PrefixCache(20, PAGE)
    fill(cache, [1, 2, 3, 4, 5], max_tokens=6, sampled=[6, 7, 8, 9])
    lease = fill(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 51], max_tokens=2)
    assert lease.cached == 8  # the last sampled token was never computed


def test_divergence_inside_a_page_copies_it():
    cache = PrefixCache(20, PAGE)
    first = fill(cache, list(range(9)))
    lease = fill(cache, [0, 1, 2, 3, 4, 5, 99, 98, 97])
    assert lease.cached == 6
    assert lease.copy == (first.pages[1], lease.pages[1])
    assert lease.pages[0] == first.pages[0]


def test_twins_wait_for_the_first_of_them():
    cache = PrefixCache(20, PAGE)
    first = cache.acquire(list(range(10)), 3)
    assert cache.acquire(list(range(10)), 3) == "pending"
    cache.computed(first, 4)
    assert cache.acquire(list(range(10)), 3) == "pending"
    cache.computed(first, 9)
    assert cache.acquire(list(range(10)), 3).cached == 9


def test_a_cancelled_owner_frees_those_who_wait():
    cache = PrefixCache(20, PAGE)
    first = cache.acquire(list(range(10)), 3)
    cache.release(first, list(range(10)), 4)
    assert cache.acquire(list(range(10)), 3).cached == 4


def test_none_when_pages_are_short_and_eviction_by_age():
    cache = PrefixCache(6, PAGE)  # five pages
    held = cache.acquire([1] * 9, 4)  # three
    assert cache.acquire([2] * 9, 4) is None
    cache.release(held, [1] * 9, 8)
    fill(cache, [2] * 9)  # two of the three free pages; [1] * 8 stays
    assert cache.acquire([1] * 9, 1).cached == 8


def test_the_oldest_goes_first():
    cache = PrefixCache(5, PAGE)  # four pages: three stay cached beside the two of a request
    for token in (1, 2, 3, 4, 5):
        fill(cache, [token] * 5)
    assert fill(cache, [3] * 5).cached == 4
    assert fill(cache, [2] * 5).cached == 0


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.data())
def test_pages_are_never_shared_wrongly_nor_lost(data):
    """Plays random requests against a model of what every page holds."""
    cache = PrefixCache(data.draw(st.integers(5, 14)), PAGE)
    total = cache.available
    written: dict[tuple[int, int], int] = {}  # (page, offset) -> token
    running = []
    for _ in range(data.draw(st.integers(1, 25))):
        if running and data.draw(st.booleans()):
            lease, tokens, length = running.pop(data.draw(st.integers(0, len(running) - 1)))
            cache.release(lease, tokens, length)
            continue
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
        sampled = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
        lease = cache.acquire(prompt, len(sampled))
        if not isinstance(lease, Lease):
            continue
        if lease.copy is not None:
            source, target = lease.copy
            for offset in range(PAGE):
                written[target, offset] = written.get((source, offset), -1)
        for position in range(lease.cached):
            place = lease.pages[position // PAGE], position % PAGE
            assert written[place] == prompt[position]
        tokens = prompt + sampled
        length = data.draw(st.sampled_from([lease.cached, len(prompt) - 1, len(tokens) - 1]))
        for position in range(lease.cached, length):
            written[lease.pages[position // PAGE], position % PAGE] = tokens[position]
        cache.computed(lease, length)
        running.append((lease, tokens, length))
        for other, other_tokens, other_length in running:
            for position in range(other_length):
                place = other.pages[position // PAGE], position % PAGE
                assert written[place] == other_tokens[position]
    for lease, tokens, length in running:
        cache.release(lease, tokens, length)
    assert cache.available == total


def test_clear_forgets():
    cache = PrefixCache(20, PAGE)
    fill(cache, list(range(10)))
    cache.clear()
    assert fill(cache, list(range(10))).cached == 0


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (2, 1), (5, 1), (6, 2)])
def test_the_last_token_needs_no_room(length, pages):
    assert PrefixCache(20, PAGE).pages_for(length) == pages
