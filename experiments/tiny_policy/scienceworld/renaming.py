"""The same transcript with other names.

Three hundred items are few enough to be learned by heart, and validation names animals that
training never does. With names that change from copy to copy, what pays is to copy what was read.
"""

from __future__ import annotations

import functools
import random
import re

from experiments.tiny_policy.scienceworld.actor import BOXES, ROOMS
from experiments.tiny_policy.scienceworld.plan import targets
from experiments.tiny_policy.transcripts import Transcript


def renamed(transcript: Transcript, rng: random.Random) -> Transcript:
    """Swaps names for others of their kind, in all messages alike.

    The rooms where plants and animals live keep theirs, and animals theirs where the question is
    which lives longest.
    """
    messages = transcript["messages"]
    kinds = [_ROOMS, BOXES, _trees()]
    if not any("life span" in message["content"] for message in messages):
        kinds.append(_animals())
    names: dict[str, str] = {}
    for kind in kinds:
        names |= zip(kind, rng.sample(kind, len(kind)), strict=True)
    longest_first = sorted(names, key=len, reverse=True)
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, longest_first))})\b")
    swapped = [
        message | {"content": pattern.sub(lambda found: names[found[0]], message["content"])}
        for message in messages
    ]
    return transcript | {"messages": swapped}


_ROOMS = tuple(room for room in ROOMS if room not in ("outside", "greenhouse"))


@functools.cache
def _trees() -> tuple[str, ...]:
    return tuple(sorted({t.name for t in targets().values() if t.name.endswith(" tree")}))


@functools.cache
def _animals() -> tuple[str, ...]:
    found = {t.name for i, t in targets().items() if t.room == "outside" and i.startswith("find-")}
    return tuple(sorted(found))
