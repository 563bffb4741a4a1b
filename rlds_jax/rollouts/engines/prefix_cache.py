"""Which page of the key-value cache holds which tokens: a tree of pages shared between requests.

A page holds `page_size` positions. A node of the tree is one page, and its path from the root
spells the tokens before it, so two requests share a page only when everything up to its end is
equal. Full pages are shared in place; a page that agrees in its first tokens only is copied. Pages
nobody uses stay until room is needed, least recently used first. Pure bookkeeping: no arrays, one
thread.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Literal


@dataclasses.dataclass(eq=False)
class Node:
    """One page of the tree.

    Attributes:
      tokens: its tokens; only a leaf may have fewer than a page.
      ready: its keys and values are computed; while False, its owner is about to.
      users: leases that hold it.
    """

    page: int
    parent: Node | None
    tokens: tuple[int, ...]
    ready: bool
    users: int = 1
    children: dict[tuple[int, ...], Node] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Lease:
    """The pages of one request.

    Attributes:
      pages: page table for the prompt and every token that may follow.
      nodes: tree nodes of the leading pages.
      cached: tokens whose keys and values were found.
      copy: (source, target) page to copy before anything else, or None.
    """

    pages: list[int]
    nodes: list[Node]
    cached: int
    copy: tuple[int, int] | None


class PrefixCache:
    """Hands out pages 1..num_pages - 1; page 0 is the kernels' scratch page."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self.clear()

    def clear(self) -> None:
        """Forgets everything. No lease may be outstanding."""
        self._root = Node(page=0, parent=None, tokens=(), ready=True)
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._idle = 0  # nodes without users; every one of them can be evicted, leaves first
        self._idle_leaves: collections.OrderedDict[Node, None] = collections.OrderedDict()

    @property
    def available(self) -> int:
        """Pages that are free or can be evicted."""
        return len(self._free) + self._idle

    def pages_for(self, length: int) -> int:
        """Pages of a sequence of `length` tokens, whose last one is never written."""
        return -(-(length - 1) // self.page_size)

    def acquire(self, tokens: Sequence[int], max_tokens: int) -> Lease | Literal["pending"] | None:
        """Leases pages for a prompt and its completion.

        At most len(tokens) - 1 tokens count as cached: the last one is always computed.

        Returns:
          a Lease; "pending" when the next page of the prompt is being computed for another request
          and worth waiting for; None when there are not enough pages now.
        """
        body = tuple(tokens[:-1])
        path = self._match(body)
        here = path[-1] if path else self._root
        start = len(path) * self.page_size
        following = body[start : start + self.page_size]
        if (child := here.children.get(following)) is not None and not child.ready:
            return "pending"
        needed = self.pages_for(len(tokens) + max_tokens) - len(path)
        room = self.available - sum(node.users == 0 for node in path)
        source, shared = self._closest(here, following)
        if source is not None and room - (source.users == 0) < needed:
            source, shared = None, 0
        if room < needed:
            return None
        held = path if source is None else [*path, source]
        self._hold(held)
        fresh = [self._take() for _ in range(needed)]
        self._drop(held[len(path) :])
        return Lease(
            pages=[node.page for node in path] + fresh,
            nodes=path + self._announce(here, body[start:], fresh),
            cached=start + shared,
            copy=None if source is None else (source.page, fresh[0]),
        )

    def computed(self, lease: Lease, length: int) -> None:
        """The first `length` tokens have their keys and values: others may share them."""
        end = 0
        for node in lease.nodes:
            end += len(node.tokens)
            node.ready = node.ready or end <= length

    def release(self, lease: Lease, tokens: Sequence[int], length: int) -> None:
        """Ends a lease; the first `length` of `tokens`, all computed, stay cached."""
        self.computed(lease, length)
        kept = [n for n in lease.nodes if n.ready and len(n.tokens) == self.page_size]
        for node in reversed(lease.nodes[len(kept) :]):
            self._detach(node)
        spare = lease.pages[len(kept) :]
        here = kept[-1] if kept else self._root
        for start in range(len(kept) * self.page_size, length, self.page_size):
            piece = tuple(tokens[start : min(start + self.page_size, length)])
            page = spare.pop(0)
            existing = here.children.get(piece)
            if existing is None:
                here = self._attach(here, page, piece, ready=True)
            else:
                self._free.append(page)
                if not existing.ready:
                    break  # its owner will cache it
                self._hold([existing])
                here = existing
            kept.append(here)
        self._free.extend(spare)
        self._drop(kept)

    def _match(self, body: tuple[int, ...]) -> list[Node]:
        """The ready full pages that spell the start of `body`."""
        path: list[Node] = []
        here = self._root
        for start in range(0, len(body) - self.page_size + 1, self.page_size):
            child = here.children.get(body[start : start + self.page_size])
            if child is None or not child.ready:
                break
            path.append(child)
            here = child
        return path

    def _closest(self, here: Node, following: tuple[int, ...]) -> tuple[Node | None, int]:
        """The ready child that agrees longest with `following`, and for how many tokens."""
        best: Node | None = None
        length = 0
        for child in here.children.values():
            if child.ready and (common := _common_prefix(child.tokens, following)) > length:
                best, length = child, common
        return best, length

    def _announce(self, here: Node, rest: tuple[int, ...], fresh: Sequence[int]) -> list[Node]:
        """Enters the prompt's own pages, not ready yet, for others to wait for."""
        nodes: list[Node] = []
        pieces = range(0, len(rest), self.page_size)
        for page, start in zip(fresh, pieces, strict=False):
            piece = rest[start : start + self.page_size]
            if piece in here.children:
                break
            here = self._attach(here, page, piece, ready=False)
            nodes.append(here)
        return nodes

    def _attach(self, parent: Node, page: int, tokens: tuple[int, ...], *, ready: bool) -> Node:
        """A new node with one user, under a parent that is held (or the root)."""
        node = Node(page, parent, tokens, ready)
        parent.children[tokens] = node
        return node

    def _detach(self, node: Node) -> None:
        """Takes a childless node out of the tree; its page stays with the caller."""
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.tokens]

    def _hold(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._idle -= node.users == 0
            self._idle_leaves.pop(node, None)
            node.users += 1

    def _drop(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.users -= 1
            self._idle += node.users == 0
            if node.users == 0 and not node.children:
                self._idle_leaves[node] = None

    def _take(self) -> int:
        """A free page, or the least recently used idle leaf's."""
        if self._free:
            return self._free.pop()
        node, _ = self._idle_leaves.popitem(last=False)
        self._detach(node)
        self._idle -= 1
        parent = node.parent
        assert parent is not None
        if parent is not self._root and parent.users == 0 and not parent.children:
            self._idle_leaves[parent] = None
            self._idle_leaves.move_to_end(parent, last=False)
        return node.page


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
