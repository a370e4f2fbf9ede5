"""The shape of a draft tree that is fixed before anything is drawn, as a user says it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtp import UserError


@dataclass(frozen=True, slots=True)
class Shape:
    """How many children every node has. A node is named by its rank among its siblings, and theirs above it.

    `widths` say it depth by depth; depths of which they say nothing have one child each, so that without any
    it is a chain. `paths` (Medusa's sparse tree) are all nodes of the tree: (1, 0) is the best child of the
    root's second.

    >>> Shape(widths=(2, 1)).children((1,)), Shape(paths=frozenset({(0,), (1,), (1, 0)})).children((1,))
    (1, 1)
    """

    widths: tuple[int, ...] = ()
    paths: frozenset[tuple[int, ...]] = field(default_factory=frozenset)

    @property
    def is_chain(self) -> bool:
        return not self.widths and not self.paths

    def children(self, ranks: tuple[int, ...]) -> int:
        if self.paths:
            return sum(path[:-1] == ranks for path in self.paths)
        return self.widths[len(ranks)] if len(ranks) < len(self.widths) else 1


def read_shape(drafter: str, vocab_size: int, widths: Any = None, paths: Any = None) -> Shape:
    """The options of a drafter of this name; neither is a chain. UserError for what is no tree."""
    if paths is None:
        return Shape(read_widths(drafter, widths, vocab_size))
    if widths is not None:
        raise UserError(f"drafter={drafter}: widths and paths are two ways to say a tree; give one of them")
    return Shape(paths=read_paths(drafter, paths, vocab_size))


def read_widths(drafter: str, widths: Any, vocab_size: int) -> tuple[int, ...]:
    """Children of a node by depth, as a user says them; None is a chain."""
    found = () if widths is None else tuple(widths) if is_list(widths) else (widths,)
    if (widths is not None and not found) or not all(is_whole(value, 1) for value in found):
        raise UserError(f"drafter={drafter}: widths={widths!r} is not a list of whole numbers of at least 1")
    check_breadth(f"drafter={drafter}: widths={list(found)}", max(found, default=0), vocab_size)
    return found


def read_paths(drafter: str, paths: Any, vocab_size: int) -> frozenset[tuple[int, ...]]:
    """The nodes of a sparse tree; every parent and every elder sibling of a node must be one."""
    lines = list(paths) if is_list(paths) else []
    if not lines or not all(is_path(line) for line in lines):
        raise UserError(
            f"drafter={drafter}: paths={paths!r} is not a list of lists of ranks, such as [[0],[1],[0,0]]"
        )
    nodes = frozenset(tuple(line) for line in lines)
    for *above, rank in sorted(nodes):
        needed = [(*above, rank - 1)] * (rank > 0) + [tuple(above)] * bool(above)
        if missing := [list(node) for node in needed if node not in nodes]:
            raise UserError(f"drafter={drafter}: paths has {[*above, rank]}, but not {missing[0]} before it")
    check_breadth(f"drafter={drafter}: paths", 1 + max(node[-1] for node in nodes), vocab_size)
    return nodes


def is_path(line: object) -> bool:
    return (
        isinstance(line, Sequence) and is_list(line) and len(line) > 0 and all(is_whole(n, 0) for n in line)
    )


def check_breadth(what: str, breadth: int, vocab_size: int) -> None:
    if breadth > vocab_size:
        raise UserError(f"{what} is a tree wider than the vocabulary of {vocab_size}")


def is_list(value: object) -> bool:
    """A list, or OmegaConf's own."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
