"""Where the nodes of a tree lie for modules that stand one slot lower each: DeepSeek-V3's MTP modules.

Shapes: B rows, C columns of the line, N nodes, K nodes of a level, W = C + N columns, S slots, H hidden size.
"""

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.branching import Level
from decoding.cache import KVCache, Window


class Staggered:
    """One pass of a module: C slots of every row's line from `starts` on, then all nodes drafted so far.

    With n tokens committed slot n-k of module k is fed the root, so slot n-k+i is fed a node of depth i, one
    for every node of that depth. What module k says there is made of the node's token and of what module k-1
    says at the node's parent, and looks at the node's ancestors and at slots up to n-k. It depends on
    nothing beside the path, so every node needs one place in each module, wherever else the tree goes. That
    place lies behind the line, for slot n-k+i can be only one node's. A node whose slot is below 0, in a text
    that is too short, is looked at by no other.

    One row with n = 7, the line from slot 5 on (C = 2), two children of the root, each with one of its own:

    >>> nodes = Staggered([5], [7], columns=2, device=torch.device("cpu"))
    >>> nodes.add(Level(torch.tensor([[11, 12]]), torch.tensor([[0, 0]])))
    >>> nodes.add(Level(torch.tensor([[13, 14]]), torch.tensor([[0, 1]])))
    >>> nodes.parents
    tensor([[0, 0, 1, 2]])

    Module 3 has the root at slot 4 and the nodes at 5, 5, 6, 6, stored in slots 7 ... 10. Columns of its pass
    read these columns of module 2's, which has the root at slot 5, column 0, and the nodes from column 2 on:

    >>> nodes.positions(3)
    tensor([[5, 6, 5, 5, 6, 6]])
    >>> nodes.sources(3)
    tensor([[0, 1, 0, 0, 2, 3]])

    Slots 5 and 6 of the line are fed drafted tokens, so nodes look at slots up to 4 and at nodes:

    >>> nodes.mask(3, size=11)[0, 0].int()
    tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
            [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 1, 1, 0, 0, 1, 0, 0, 0],
            [1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0],
            [1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 0],
            [1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 1]], dtype=torch.int32)
    """

    def __init__(self, starts: list[int], lengths: list[int], *, columns: int, device: torch.device):
        self.line = torch.arange(columns, device=device)  # [C]
        self.start = torch.tensor(starts, device=device)[:, None]  # [B, 1]
        self.length = torch.tensor(lengths, device=device)[:, None]  # [B, 1] n
        self.tokens = self.start[:, :0]  # [B, N]
        self.parents = self.start[:, :0]  # [B, N] node numbers, 0 the root
        self.depths = self.line[:0]  # [N]
        self.seen = torch.ones_like(self.start, dtype=torch.bool)[:, None]  # [B, N+1, N+1], as tree.ancestors
        self.latest = torch.zeros_like(self.start)  # [B, K] numbers of the deepest nodes

    def add(self, level: Level) -> None:
        """Children of the deepest nodes."""
        parents = self.latest.gather(1, level.above.to(self.latest.device))  # [B, K]
        count, first = parents.shape[1], self.seen.shape[1]
        above = self.seen.gather(1, parents[..., None].expand(-1, -1, first))  # [B, K, N+1]
        own = torch.eye(count, dtype=torch.bool, device=above.device).expand(len(above), -1, -1)
        self.seen = torch.cat([pad(self.seen, (0, count)), torch.cat([above, own], dim=2)], dim=1)
        self.tokens = torch.cat([self.tokens, level.tokens], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self.latest = torch.arange(first, first + count, device=parents.device).expand_as(parents)
        deeper = self.depths[-1:].sum() + 1  # the sum of nothing is 0
        self.depths = torch.cat([self.depths, deeper.expand(count)])

    def columns(self, nodes: Tensor, depth: int) -> Tensor:
        """Columns [B, K] of module `depth`'s pass that hold nodes [B, K]; the root's is on the line."""
        root = (self.length - depth - self.start).clamp(min=0)
        return torch.where(nodes == 0, root, nodes + len(self.line) - 1)

    def sources(self, depth: int) -> Tensor:
        """Columns [B, W] of module depth-1's pass whose states the columns of module `depth`'s are made
        of."""
        line = self.line.expand(len(self.start), -1)
        return torch.cat([line, self.columns(self.parents, depth - 1)], dim=1)

    def positions(self, depth: int) -> Tensor:
        """[B, W] for the rotary embedding."""
        nodes = (self.length - depth + self.depths).clamp(min=0)
        return torch.cat([self.start + self.line, nodes], dim=1)

    def mask(self, depth: int, size: int) -> Tensor:
        """[B, 1, W, S] True where a column may look: S = `size` slots."""
        slots, root = torch.arange(size, device=self.line.device), self.length - depth
        line = slots <= (self.start + self.line)[..., None]  # [B, C, S]
        count = len(self.depths)
        number = slots - self.start - len(self.line)  # [B, S] node of a slot, counted from 0
        inside = (number >= 0) & (number < count)
        own = torch.eye(count, dtype=torch.bool, device=slots.device)
        seen = self.seen[:, 1:, 1:] & (root + self.depths >= 0)[:, None] | own  # [B, N, N]
        place = number.clamp(0, count - 1)[:, None].expand(-1, count, -1)
        nodes = torch.where(inside[:, None], seen.gather(2, place), (slots <= root)[:, None])  # [B, N, S]
        return torch.cat([line, nodes], dim=1)[:, None]

    def open(self, depth: int, streams: KVCache) -> Window:
        """Scratch slots of module `depth`'s pass, in `streams` whose lengths are `starts`."""
        window = streams.open(len(self.line) + len(self.depths))
        if not len(self.depths):
            return window
        mask = self.mask(depth, window.size)
        return dataclasses.replace(window, positions=self.positions(depth), mask=mask)
