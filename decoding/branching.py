"""Draft trees whose shape is fixed before anything is drawn.

Shapes: B rows, N draft nodes, C siblings, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.draft import Context, Draft
from mtp import UserError

Level = list[tuple[int, Tensor]]  # nodes of one depth, each with the drafted tokens [B, depth] down to it


class Branches:
    """A draft that grows level by level: every node at depth k-1 gets `widths[k-1]` children (rule 6).

    That is the whole product tree, numbered level by level; widths [2, 1, 2] have parents 0 0, 1 2,
    3 3 4 4. Depths of which widths say nothing have one child each, so that without widths it is a chain.
    """

    def __init__(self, widths: Sequence[int], context: Context):
        self.widths, self.context = widths, context
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.tokens: list[Tensor] = []  # [B, C] each
        self.laws: list[Tensor] = []  # [B, C, V] each
        self.level: Level = []  # the deepest nodes

    def grow(self, logits: Sequence[Tensor]) -> None:
        """Draw the children of every node of the deepest level, from logits [B, V] for each of them."""
        if not self.parents:
            self.level = [(0, torch.empty(len(logits[0]), 0, dtype=torch.long, device=logits[0].device))]
        above, self.level = self.level, []
        for (parent, path), scores in zip(above, logits, strict=True):
            self._children(parent, path, scores)

    def _children(self, parent: int, path: Tensor, logits: Tensor) -> None:
        depth = path.shape[1] + 1
        width = self.widths[depth - 1] if depth <= len(self.widths) else 1
        first = len(self.parents) + 1
        law = self.context.law(logits, path)
        if width == 1:
            token, law_drawn = self.context.draw(law, depth, first)
            tokens, q = token[:, None], None if law_drawn is None else law_drawn[:, None]
        else:
            tokens, q = self.context.draw_siblings(law, logits, depth, range(first, first + width))
        self.tokens.append(tokens)
        self.laws += [] if q is None else [q]
        self.parents += [parent] * width
        self.depths += [depth] * width
        self.level += [(first + c, torch.cat([path, tokens[:, c : c + 1]], 1)) for c in range(width)]

    def draft(self, room: list[int]) -> Draft:
        """What was drawn; nodes deeper than a row's room are unused."""
        tokens = torch.cat(self.tokens, dim=1)
        inside = torch.tensor(self.depths) <= torch.tensor(room)[:, None]
        parents = torch.where(inside, torch.tensor(self.parents), -1).to(tokens.device)
        return Draft(tokens, parents, torch.cat(self.laws, dim=1) if self.laws else None)


def draw_tree(logits: Iterable[Tensor], widths: Sequence[int], context: Context, room: list[int]) -> Draft:
    """A draft from one [B, V] of logits a depth, where no path changes what a head says.

    Laws may depend on the path still, through a row's processors, so every node with children has its own.
    """
    branches = Branches(widths, context)
    for scores in logits:
        branches.grow([scores] * max(1, len(branches.level)))
    return branches.draft(room)


def read_widths(drafter: str, widths: Any, vocab_size: int) -> tuple[int, ...]:
    """Children of a node by depth, as a user says them; None is a chain."""
    several = isinstance(widths, Sequence) and not isinstance(widths, str)  # a list, or OmegaConf's own
    found = () if widths is None else tuple(widths) if several else (widths,)
    if (widths is not None and not found) or not all(map(is_width, found)):
        raise UserError(f"drafter={drafter}: widths={widths!r} is not a list of whole numbers of at least 1")
    if max(found, default=0) > vocab_size:
        raise UserError(
            f"drafter={drafter}: widths={list(found)} is a tree wider than the vocabulary of {vocab_size}"
        )
    return found


def is_width(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
