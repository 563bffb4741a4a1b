"""Think blocks: what a policy writes there is private and never acts (METHOD section 4)."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"<think>(?:(?!<think>).)*?(?:</think>|\Z)", re.IGNORECASE | re.DOTALL)
_CLOSE = re.compile(r"</think>", re.IGNORECASE)


def outside_think(text: str) -> str:
    """Removes think blocks, nested ones too.

    A block left open runs to the end of the text; one that was opened before the text (some
    templates open it in the prompt) runs from its beginning.
    """
    while (stripped := _BLOCK.sub("", text)) != text:
        text = stripped
    return _CLOSE.split(text)[-1]
