import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlds_jax.tasks.think import outside_think
from rlds_jax.tasks.tool_calls import MalformedCall, ToolCall, check_arguments, parse_tool_calls

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "top_k": {"type": "integer", "minimum": 1, "maximum": 50, "default": 5},
            },
            "required": ["query"],
        },
    },
}


def block(body):
    return f"<tool_call>{body}</tool_call>"


def call(query, **arguments):
    return ToolCall("search", {"query": query, **arguments})


def search(query, **arguments):
    return block(json.dumps({"name": "search", "arguments": {"query": query, **arguments}}))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call at all", []),
        (search("a"), [call("a")]),
        (f"first I look\n{search('a', top_k=3)} and then", [call("a", top_k=3)]),
        (search("a") + "\n" + search("b"), [call("a"), call("b")]),
        (block('\n {"name": "search", "arguments": {"query": "a"}}\n'), [call("a")]),
        (search("how does </tool_call> end?"), [call("how does </tool_call> end?")]),
        (search('a "quoted \\ </tool_call> one"'), [call('a "quoted \\ </tool_call> one"')]),
        (search("</tool_call>") + search("b"), [call("</tool_call>"), call("b")]),
        (search("what is <tool_call>?"), [call("what is <tool_call>?")]),
        (search("the <think> tag"), [call("the <think> tag")]),
        (search("a </think> tag") + search("b"), [call("a </think> tag"), call("b")]),
        # Repairs.
        (block('{"name": "search", "arguments": {"query": "two\nlines"}}'), [call("two\nlines")]),
        (block('{"name": "search", "arguments": {"query": "a",}, }'), [call("a")]),
        (
            block('{"name": "search", "arguments": {"query": "a,}", "x": [1, ]}}'),
            [call("a,}", x=[1])],
        ),
        (block(json.dumps({"name": "search", "arguments": '{"query": "a",}'})), [call("a")]),
        (block('{"name": "search"}'), [ToolCall("search", {})]),
        (block('{"name": "search", "arguments": null}'), [ToolCall("search", {})]),
        # Think blocks.
        (f"<think>{search('a')}</think>", []),
        (f"<think>{search('a')}</think>{search('b')}", [call("b")]),
        (f"<think>{search('a')}", []),
        (f"{search('a')}</think>{search('b')}", [call("b")]),
        (f"<think><think></think>{search('a')}</think>{search('b')}", [call("b")]),
    ],
)
def test_calls(text, calls):
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('<tool_call>{"name": "search", "arguments": {"query": "cut', "not closed"),
        ('<tool_call>{"name": "search", "arguments": {"query": "a"}}', "not closed"),
        (block(""), "not valid JSON"),
        (block("search(a)"), "not valid JSON"),
        (block("{'name': 'search'}"), "not valid JSON"),
        (block('{"name": "search", "arguments": {"query": "a"}'), "not valid JSON"),
        (block('{"name": "search", "arguments": {"query": "open}}'), "not valid JSON"),
        (block('{"name": "search"} {"name": "search"}'), "not valid JSON"),
        (block('{"name": "search", "arguments": {"top_k": NaN}}'), "NaN"),
        (block("[" * 100_000), "not valid JSON"),
        (block('{"name": "search", "arguments": {"top_k": ' + "9" * 5000 + "}}"), "JSON"),
        (block('[{"name": "search"}]'), "JSON object"),
        (block("null"), "JSON object"),
        (block('{"arguments": {"query": "a"}}'), '"name"'),
        (block('{"name": 3, "arguments": {}}'), '"name"'),
        (block('{"name": " ", "arguments": {}}'), '"name"'),
        (block('{"name": "search", "arguments": ["a"]}'), "JSON object"),
        (block('{"name": "search", "arguments": "a"}'), "not valid JSON"),
        (block('{"name": "search", "arguments": "[1]"}'), "JSON object"),
    ],
)
def test_malformed_calls_say_what_is_wrong(text, words):
    (malformed,) = parse_tool_calls(text)
    assert isinstance(malformed, MalformedCall)
    assert words in malformed.error


@pytest.mark.parametrize(
    "broken",
    [
        block('{"name": "search", "arguments": {"query": "open}}'),
        block('{"name": search}'),
        '<tool_call>{"name": "search", "arguments": {"query": "never closed ',
        '<tool_call>{"name": "search"',
    ],
)
def test_a_broken_call_does_not_swallow_the_next_one(broken):
    first, second = parse_tool_calls(broken + "\n" + search("b"))
    assert isinstance(first, MalformedCall)
    assert second == call("b")


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "search", "arguments": {"query": "',
    '"}}',
    '"',
    "\\",
    ",}",
    "\n",
    "\ud800",
    "\x00",
    search("a"),
]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=30).map("".join)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_no_text_makes_it_raise(text):
    calls = parse_tool_calls(text)
    assert len(calls) <= text.count("<tool_call>")
    for parsed in calls:
        if isinstance(parsed, ToolCall):
            check_arguments(parsed, [SEARCH])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.text(), st.integers(1, 50)), max_size=4), st.text(max_size=20))
def test_every_call_that_was_written_is_read_back(queries, between):
    between = between.replace("<", "")
    text = between.join(search(query, top_k=k) for query, k in queries)
    assert parse_tool_calls(text) == [call(query, top_k=k) for query, k in queries]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "text ", search("a"), block("{")])))
def test_think_blocks_are_those_of_the_other_tasks(pieces):
    text = "".join(pieces)
    assert parse_tool_calls(text) == parse_tool_calls(outside_think(text))


def test_a_long_text_of_tags_is_read():
    text = '<tool_call>{"a": "' * 1000 + "</tool_call>" * 1000
    assert all(isinstance(c, MalformedCall) for c in parse_tool_calls(text))


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ({"query": "a"}, {"query": "a", "top_k": 5}),
        ({"query": "a", "top_k": 50, "why": "because"}, {"query": "a", "top_k": 50}),
        ({}, '"query" is missing'),
        ({"query": 3}, '"query" must be of type string'),
        ({"query": None}, '"query" must be of type string'),
        ({"query": "a", "top_k": "3"}, '"top_k" must be of type integer'),
        ({"query": "a", "top_k": 3.0}, '"top_k" must be of type integer'),
        ({"query": "a", "top_k": True}, '"top_k" must be of type integer'),
        ({"query": "a", "top_k": 0}, '"top_k" must be from 1 to 50'),
        ({"query": "a", "top_k": 51}, '"top_k" must be from 1 to 50'),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments, result):
    checked = check_arguments(ToolCall("search", arguments), [SEARCH])
    if isinstance(checked, MalformedCall):
        assert result in checked.error
    else:
        assert checked == result


def test_an_unknown_tool_is_named_with_those_there_are():
    checked = check_arguments(ToolCall("browse", {}), [SEARCH])
    assert isinstance(checked, MalformedCall)
    assert "browse" in checked.error
    assert "search" in checked.error
