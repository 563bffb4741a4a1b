"""Chat transcripts in jsonl to token sequences with a loss mask.

One line is one transcript:

    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."},
                  {"role": "assistant", "content": "..."}], "tools": [...]}

`tools` is optional, and an assistant message may carry `"loss": false`: it is context, not target.
Other top-level fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlds_jax.batch import TokenSequence, nll_sequence
from rlds_jax.rollouts.chat import ChatFormat

ROLES = ("system", "user", "assistant", "tool")


class Transcript(NamedTuple):
    """One demonstration.

    Attributes:
      messages: role and content.
      learned: per assistant message, whether it is a target.
      tools: tool schemas for the chat template.
      where: file and line, for messages to the user.
    """

    messages: list[dict[str, str]]
    learned: list[bool]
    tools: list[dict[str, Any]]
    where: str


def read(path: str | Path) -> Iterator[Transcript]:
    """Reads a jsonl file; blank lines are skipped.

    Raises:
      OSError: the file cannot be read.
      ValueError: naming file, line and field.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse(line, f"{path}:{number}")


def tokenise(transcript: Transcript, chat: ChatFormat) -> TokenSequence:
    """Tokens with weight 1 on the assistant contents and end-of-turn tokens to be learned.

    Raises:
      ValueError: the chat template cannot render the transcript; names file and line.
    """
    try:
        ids, mask = chat.transcript(transcript.messages, transcript.tools)
    except ValueError as error:
        raise ValueError(f"{transcript.where}: {error}") from error
    # The template's header separates assistant messages, so each is one run of the mask.
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    learned = np.asarray(transcript.learned)[np.cumsum(starts) - 1] & mask
    return nll_sequence((transcript.where,), ids, learned.astype(np.float32))


def _parse(line: bytes, where: str) -> Transcript:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a line must be a JSON object")
    messages, tools = record.get("messages"), record.get("tools", [])
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: field 'messages' must be a list with at least one message")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where}: field 'tools' must be a list of tool schemas")
    for i, message in enumerate(messages):
        _check_message(message, f"{where}: messages[{i}]")
    learned = [m.get("loss", True) for m in messages if m["role"] == "assistant"]
    if not any(learned):
        raise ValueError(f"{where}: 'messages' holds no assistant message to learn from")
    bare = [{"role": m["role"], "content": m["content"]} for m in messages]
    return Transcript(bare, learned, tools, where)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be an object with 'role' and 'content'")
    if message.get("role") not in ROLES:
        raise ValueError(f"{where}: field 'role' is {message.get('role')!r}; use one of {ROLES}")
    if not isinstance(message.get("content"), str):
        raise ValueError(f"{where}: field 'content' must be a string")
    if not isinstance(message.get("loss", True), bool):
        raise ValueError(f"{where}: field 'loss' must be true or false")
    allowed = {"role", "content"} | ({"loss"} if message["role"] == "assistant" else set())
    unknown = sorted(message.keys() - allowed)
    if unknown:
        raise ValueError(
            f"{where}: fields {unknown} are not read; tool calls are written inside 'content', "
            "and 'loss' belongs to assistant messages"
        )
