"""Passages of an encyclopedia, in the form of the Search-R1 corpus."""

from __future__ import annotations

import json
from typing import NamedTuple


class Passage(NamedTuple):
    """One retrieved passage.

    Attributes:
      id: its id in the corpus.
      title, text: of the article, and of the passage.
      score: inner product with the query; 0 where a server gives none.
    """

    id: str
    title: str
    text: str
    score: float = 0.0

    @property
    def contents(self) -> str:
        """`"title"`, a newline and the text: one string, as it is stored, encoded and sent."""
        return f'"{self.title}"\n{self.text}'

    @classmethod
    def from_contents(cls, id: str, contents: str, score: float = 0.0) -> Passage:
        title, _, text = contents.partition("\n")
        if len(title) > 1 and title.startswith('"') and title.endswith('"'):
            title = title[1:-1]
        return cls(id, title, text, score)


def parse_line(line: bytes, where: str) -> Passage:
    """One line of a corpus: {"id": ..., "contents": "\\"title\\"\\ntext"}.

    Args:
      where: of the line, for the error.

    Raises:
      ValueError: it is not such a line.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("contents"), str):
        raise ValueError(f'{where}: needs the fields "id" and "contents" (a string)')
    if not isinstance(row.get("id"), str | int):
        raise ValueError(f'{where}: needs an "id" (a string or an integer)')
    return Passage.from_contents(str(row["id"]), row["contents"])
