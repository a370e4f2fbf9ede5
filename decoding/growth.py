"""How a drafter's tree grows, as a user says it: a chain, a fixed tree, or one that goes where it is sure."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decoding.branching import Branches
from decoding.draft import Context
from decoding.ranking import Candidates
from decoding.shape import Shape, check_breadth, read_widths
from mtp import UserError
from mtp.errors import check_whole


@dataclass(frozen=True, slots=True)
class Growth:
    """Without widths and tree_nodes a chain."""

    widths: tuple[int, ...]  # children of every node by depth
    tree_nodes: int | None  # the size of EAGLE-2's tree
    top_k: int  # its children of a node, and its nodes expanded at every depth

    @property
    def is_chain(self) -> bool:
        return not self.widths and self.tree_nodes is None

    def begin(self, root: Tensor, context: Context) -> Branches | Candidates:
        """A tree below root [B]: `expand` it level by level, then `draft`."""
        if self.tree_nodes is None:
            return Branches(Shape(self.widths), context)
        return Candidates(root, self.top_k, self.tree_nodes)


def read_growth(drafter: str, vocab_size: int, *, widths: Any, tree_nodes: Any, top_k: Any) -> Growth:
    """The options of a drafter of this name; UserError where they name no tree."""
    if tree_nodes is not None:
        check_whole(f"drafter={drafter}: tree_nodes", tree_nodes, 1)
        if widths is not None:
            raise UserError(
                f"drafter={drafter}: widths and tree_nodes are two kinds of trees; give one of them"
            )
    check_whole(f"drafter={drafter}: top_k", top_k, 1)
    if tree_nodes is not None:
        check_breadth(f"drafter={drafter}: top_k={top_k}", top_k, vocab_size)
    return Growth(read_widths(drafter, widths, vocab_size), tree_nodes, top_k)
