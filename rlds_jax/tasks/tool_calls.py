"""Tool calls in the Hermes form, as the policy writes them (METHOD section 6, HotpotQA).

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Whatever the policy writes,
the parser answers: with calls that can be executed, and with calls that cannot and why.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(r"<tool_call>|<think>|</think>", re.ASCII | re.IGNORECASE)
_THINK = re.compile(r"<(/?)think>", re.ASCII | re.IGNORECASE)
_STRING = r'"(?:[^"\\]++|\\.)*+"'
# A body up to the first closing tag that is not inside a JSON string.
_BODY = re.compile(rf"((?:{_STRING}|[^\"<]++|<(?!/tool_call>))*+){_CLOSE}", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])", re.DOTALL)
_TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "array": list,
}


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A well-formed call: the tool's name and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class MalformedCall:
    """A call that cannot be executed.

    Attributes:
      error: what was wrong, in words for the policy.
      name: the tool it named, where that could be read.
    """

    error: str
    name: str | None = None


def parse_tool_calls(text: str) -> list[ToolCall | MalformedCall]:
    """The calls of one turn outside think blocks, in order; never raises.

    Repaired: raw newlines inside strings, trailing commas, `arguments` given as a JSON string or
    left out. `</tool_call>` inside a string does not end a call, and think tags there are text. A
    call that does not parse ends at the next tool-call tag; one without a closing tag is malformed.
    """
    calls: list[ToolCall | MalformedCall] = []
    at = 0
    while tag := _TAG.search(text, at):
        at = tag.end()
        name = tag.group().lower()
        if name == "</think>":  # opened before the text, so all of it was thought
            calls.clear()
        elif name == "<think>":
            at = _end_of_think(text, at)
        elif tag.group() == _OPEN:
            call, at = _parse_block(text, at)
            calls.append(call)
    return calls


def check_arguments(
    call: ToolCall, tools: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | MalformedCall:
    """The call's arguments with defaults filled in, or what is wrong with them.

    Args:
      tools: Hermes schemas ({"type": "function", "function": {"name", "parameters"}}); read are
        type, minimum, maximum and default of each property, and `required`. Arguments that the
        schema does not have are left out.
    """
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if call.name not in schemas:
        known = ", ".join(schemas)
        return MalformedCall(f'there is no tool "{call.name}"; the tools are: {known}', call.name)
    schema = schemas[call.name]
    arguments = {}
    for name, rule in schema["properties"].items():
        if name in call.arguments:
            arguments[name] = call.arguments[name]
            if error := _violation(name, arguments[name], rule):
                return MalformedCall(error, call.name)
        elif name in schema.get("required", ()):
            return MalformedCall(f'the argument "{name}" is missing', call.name)
        elif "default" in rule:
            arguments[name] = rule["default"]
    return arguments


def _violation(name: str, value: Any, rule: Mapping[str, Any]) -> str | None:
    wanted = _TYPES[rule["type"]]
    fits = isinstance(value, int | float if wanted is float else wanted)
    if not fits or (isinstance(value, bool) and wanted is not bool):
        return f'the argument "{name}" must be of type {rule["type"]}'
    low, high = rule.get("minimum"), rule.get("maximum")
    if (low is not None and value < low) or (high is not None and value > high):
        return f'the argument "{name}" must be from {low} to {high}'
    return None


def _end_of_think(text: str, at: int) -> int:
    """Where a think block that was opened before `at` ends; nested blocks count."""
    depth = 1
    for tag in _THINK.finditer(text, at):
        depth += -1 if tag.group(1) else 1
        if not depth:
            return tag.end()
    return len(text)


def _parse_block(text: str, at: int) -> tuple[ToolCall | MalformedCall, int]:
    """The call whose body starts at `at`, and where to go on."""
    closed = text.find(_CLOSE, at)
    if closed < 0:
        return MalformedCall("the call is not closed by </tool_call>"), len(text)
    call: ToolCall | MalformedCall
    if body := _BODY.match(text, at):
        call = _parse_call(body.group(1))
        if isinstance(call, ToolCall):
            return call, body.end()
        if body.end(1) == closed:
            return call, _next_block(text, at, closed)
    # A quote is open where the tag stands: the call is broken, and must not swallow the next one.
    call = _parse_call(text[at:closed])
    return call, _next_block(text, at, closed)


def _next_block(text: str, at: int, closed: int) -> int:
    """Where to go on after a broken call: past its closing tag, or at an opening one before."""
    following = text.find(_OPEN, at)
    return following if 0 <= following < closed else closed + len(_CLOSE)


def _parse_call(body: str) -> ToolCall | MalformedCall:
    try:
        call = _loads(body)
        if not isinstance(call, dict):
            return MalformedCall('a call must be a JSON object with "name" and "arguments"')
        name, arguments = call.get("name"), call.get("arguments")
        if not isinstance(name, str) or not name.strip():
            return MalformedCall('the call has no "name" of a tool')
        if isinstance(arguments, str):
            arguments = _loads(arguments)
    except json.JSONDecodeError as error:
        return MalformedCall(f"the call is not valid JSON: {error.msg} at character {error.pos}")
    except (RecursionError, ValueError) as error:  # nested too deep, or a number too long
        return MalformedCall(f"the call is not valid JSON: {error}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return MalformedCall('"arguments" must be a JSON object', name)
    return ToolCall(name.strip(), arguments)


def _loads(text: str) -> Any:
    """JSON with raw control characters in strings and trailing commas, without NaN and Infinity.

    Raises:
      ValueError, RecursionError: it is not.
    """
    text = _TRAILING_COMMA.sub(lambda match: match.group(1) or "", text)
    return json.loads(text.strip(), strict=False, parse_constant=_refuse_constant)


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON value")
