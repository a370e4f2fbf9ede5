"""Draft trees whose shape is fixed before anything is drawn.

Shapes: B rows, N draft nodes, K nodes of one depth, C siblings, V vocabulary.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.draft import Context, Draft, chain
from decoding.shape import Shape


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes of one depth, whose children come next."""

    tokens: Tensor  # [B, K]
    above: Tensor  # [B, K] which node of the level before is the parent; on any device


class Chain:
    """A draft without branches that grows token by token."""

    def __init__(self, context: Context):
        self.context = context
        self.tokens: list[Tensor] = []  # [B] each
        self.laws: list[Tensor | None] = []  # [B, V] each

    def draw(self, logits: Tensor) -> Tensor:
        """Logits [B, V] at the last node -> the token [B] after it."""
        nothing = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
        law = self.context.law(logits, torch.stack(self.tokens, dim=1) if self.tokens else nothing)
        depth = len(self.tokens) + 1
        token, q = self.context.draw(law, depth, depth)
        self.tokens.append(token)
        self.laws.append(q)
        return token

    def draft(self, room: list[int]) -> Draft:
        """What was drawn; nodes beyond a row's room are unused."""
        return chain(self.tokens, self.laws, room)


def straight(count: int, room: list[int], device: torch.device) -> Tensor:
    """Parents [B, count] of drafts without branches, nodes beyond a row's room unused; to be read only.

    >>> straight(2, [2, 1], torch.device("cpu"))
    tensor([[ 0,  1],
            [ 0, -1]])
    """
    return line_of(count, tuple(min(left, count) for left in room), device)


@functools.lru_cache
def line_of(count: int, room: tuple[int, ...], device: torch.device) -> Tensor:
    lines = [[node if node < left else -1 for node in range(count)] for left in room]
    return torch.tensor(lines, device=device)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A node whose children may come next."""

    node: int
    ranks: tuple[int, ...]  # its name in the shape
    path: Tensor  # [B, depth] the drafted tokens to it


class Branches:
    """A draft that grows level by level: every node gets as many children as `shape` says (rule 6).

    Nodes are numbered level by level; widths [2, 1, 2] have parents 0 0, 1 2, 3 3 4 4.
    """

    def __init__(self, shape: Shape, context: Context):
        self.shape, self.context = shape, context
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.tokens: list[Tensor] = []  # [B, C] each
        self.laws: list[Tensor] = []  # [B, C, V] each
        self.deepest: list[Leaf] = []

    def expand(self, logits: Tensor) -> Level:
        """Logits [B, K, V] of the level that was returned last (of the root at first) -> its children."""
        if not self.parents:
            nothing = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
            self.deepest = [Leaf(0, (), nothing)]
        above, self.deepest = self.deepest, []
        counts = [self.shape.children(leaf.ranks) for leaf in above]
        for leaf, count, scores in zip(above, counts, logits.unbind(1), strict=True):
            if count:
                self._children(leaf, count, scores)
        place = torch.arange(len(above)).repeat_interleave(torch.tensor(counts))
        lines = [leaf.path[:, -1] for leaf in self.deepest]
        tokens = torch.stack(lines, dim=1) if lines else logits.new_empty(len(logits), 0, dtype=torch.long)
        return Level(tokens, place.expand(len(tokens), -1))

    def _children(self, leaf: Leaf, count: int, logits: Tensor) -> None:
        depth, first = len(leaf.ranks) + 1, len(self.parents) + 1
        law = self.context.law(logits, leaf.path)
        if count == 1:
            token, law_drawn = self.context.draw(law, depth, first)
            tokens, q = token[:, None], None if law_drawn is None else law_drawn[:, None]
        else:
            tokens, q = self.context.draw_siblings(law, logits, depth, range(first, first + count))
        self.tokens.append(tokens)
        self.laws += [] if q is None else [q]
        self.parents += [leaf.node] * count
        self.depths += [depth] * count
        self.deepest += [
            Leaf(first + c, (*leaf.ranks, c), torch.cat([leaf.path, tokens[:, c : c + 1]], 1))
            for c in range(count)
        ]

    def draft(self, room: list[int]) -> Draft:
        """What was drawn; nodes deeper than a row's room are unused."""
        tokens = torch.cat(self.tokens, dim=1)
        inside = torch.tensor(self.depths) <= torch.tensor(room)[:, None]
        parents = torch.where(inside, torch.tensor(self.parents), -1).to(tokens.device)
        return Draft(tokens, parents, torch.cat(self.laws, dim=1) if self.laws else None)


def draw_tree(logits: Iterable[Tensor], shape: Shape, context: Context, room: list[int]) -> Draft:
    """A draft from one [B, V] of logits a depth, where no path changes what a head says.

    Laws may depend on the path still, through a row's processors, so every node with children has its own.
    """
    branches, count = Branches(shape, context), 1
    for scores in logits:
        if count:
            count = branches.expand(scores[:, None].expand(-1, count, -1)).tokens.shape[1]
    return branches.draft(room)
