"""Draft trees as arrays of parents: depths and ancestors.

Node 0 is the root; node n >= 1 has parents[:, n-1]; parents precede their children. Shapes: B rows, N draft
nodes.
"""

import torch
from torch import Tensor


def depths(parents: Tensor) -> Tensor:
    """Depth of every node, the root's being 0; unused nodes (parent -1) hang below the root.

    >>> depths(torch.tensor([[0, 1, 0, 3]]))
    tensor([[0, 1, 2, 1, 2]])
    """
    found = torch.zeros(len(parents), parents.shape[1] + 1, dtype=torch.long, device=parents.device)
    for node in range(1, found.shape[1]):
        parent = parents[:, node - 1].clamp(min=0)[:, None]
        found[:, node] = found.gather(1, parent)[:, 0] + 1
    return found  # [B, N+1]


def ancestors(parents: Tensor) -> Tensor:
    """[B, N+1, N+1] bool: entry n, m says that node m is node n or an ancestor of it.

    >>> ancestors(torch.tensor([[0, 0]]))[0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """
    batch, count = len(parents), parents.shape[1] + 1
    seen = torch.eye(count, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    for node in range(1, count):
        parent = parents[:, node - 1].clamp(min=0)
        seen[:, node] |= seen[torch.arange(batch, device=parents.device), parent]
    return seen


def is_chain(parents: Tensor) -> bool:
    """Whether every used node hangs on the one before it (host tensor)."""
    line = torch.arange(parents.shape[1])
    return not len(line) or bool(((parents == line) | (parents < 0)).all())


def in_line(parents: list[list[int]]) -> bool:
    """is_chain of lists, one a row, which is cheaper for a few.

    >>> in_line([[0, 1, 2], [0, -1, -1]]), in_line([[0, 0]])
    (True, False)
    """
    return all(parent in (node, -1) for line in parents for node, parent in enumerate(line))


def height(parents: Tensor) -> int:
    """Depth of the deepest node (host tensor)."""
    return parents.shape[1] if is_chain(parents) else int(depths(parents).max())
