"""Think blocks: what a policy writes there is private and never acts (METHOD section 4)."""

from __future__ import annotations

import re

_TAG = re.compile(r"<(/?)think>", re.IGNORECASE | re.ASCII)


def outside_think(text: str) -> str:
    """Removes think blocks, nested ones too.

    A block left open runs to the end of the text; one that was opened before the text (some
    templates open it in the prompt) runs from its beginning.
    """
    outside: list[str] = []
    depth, start = 0, 0
    for tag in _TAG.finditer(text):
        if not depth:
            outside.append(text[start : tag.start()])
        start = tag.end()
        if not tag.group(1):
            depth += 1
        elif depth:
            depth -= 1
        else:
            outside.clear()
    return "".join(outside) + ("" if depth else text[start:])
