"""Drafting with DeepSeek-V3's sequential modules, their own states rolled back with the text.

Shapes: B rows, W positions run at once, N nodes, H hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.branching import Chain
from decoding.cache import KVCache
from decoding.committed import Committed
from decoding.draft import Context, Draft, no_draft
from decoding.drafters.parallel import drafting_room
from decoding.growth import Growth, read_growth
from decoding.heads import need_head
from decoding.staggered import Staggered
from mtp import Network
from mtp.sequential import Sequential


class SequentialDrafter:
    """With n committed tokens and the root at position n, module k drafts token n+k from slot n-1.

    Slot j of module k holds what it made of state h^{k-1}_j and token j+k. That is final when token j+k is
    the root or older: j <= n-k. `propose` fills the k-1 slots above with drafted tokens; they are scratch.
    All modules of a draft run on the same slots, from the first that one of them has not got final: each
    module's input states come straight from the module before it, and what a verdict changed is computed
    anew. A module that is not asked for lags behind and catches up when it is.

    Three modules ran with n = 7: modules 1, 2, 3 are final up to slots 6, 5, 4. One more token is committed,
    n = 8:
    all three run on slots 5, 6, 7.

    In a tree a scratch slot is fed another token on every path, so its nodes lie behind these slots; see
    Staggered.
    """

    def __init__(self, network: Network, head: Sequential, growth: Growth):
        self.trunk, self.head, self.growth = network.trunk, head, growth
        self.taps = head.taps

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.streams = KVCache(batch_size, self.trunk.device)  # one layer a depth
        self.committed = Committed(batch_size)
        self.final: list[list[int]] = []  # by depth and row: slots that are final

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        self.committed.extend(tokens, states[self.trunk.num_layers], keep)

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        count = min(num_draft_tokens, max(context.room))
        if count <= 0 or not any(self.committed.lengths):
            return no_draft(root)
        self.final += [[0] * len(root) for _ in range(count - len(self.final))]
        self.streams.lengths = [min(slots) for slots in zip(*self.final[:count], strict=True)]
        room = drafting_room(context.room, self.committed.lengths)
        grow = self._chain if self.growth.is_chain else self._tree
        draft = grow(root, count, context, room)
        for depth in range(1, count + 1):
            self.final[depth - 1] = [max(length - depth + 1, 0) for length in self.committed.lengths]
        return draft

    def _line(self, root: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Open slots of every row: tokens [B, W+count+1] up to the root, with places for what is drafted;
        the trunk's states [B, W, H]; the root's place in the line [B]."""
        line, hidden, counts = self.committed.since(self.streams.lengths)
        here = torch.tensor(counts, device=root.device)
        line = torch.cat([line, line.new_zeros(len(line), count + 1)], dim=1)
        line[torch.arange(len(root), device=root.device), here] = root
        return line, hidden, here

    def _chain(self, root: Tensor, count: int, context: Context, room: list[int]) -> Draft:
        """Modules 1 ... count over all open slots, each fed the tokens that those before it drafted."""
        line, hidden, here = self._line(root, count)
        width, rows = hidden.shape[1], torch.arange(len(root), device=root.device)
        window = self.streams.open(width)
        rotary = self.trunk.rotary(hidden, window.positions)
        last = (here - 1).clamp(min=0)
        drawn = Chain(context)
        for depth in range(1, count + 1):
            fed = self.trunk.embed(line[:, depth : depth + width])
            stream = self.streams.layer(depth - 1)
            hidden = self.head.stage(depth)(hidden, fed, rotary, window.mask, stream)
            logits = self.head.logits(self.trunk, depth, hidden[rows, last])
            line[rows, here + depth] = drawn.draw(logits)
        return drawn.draft(room)

    def _tree(self, root: Tensor, count: int, context: Context, room: list[int]) -> Draft:
        """Modules 1 ... count over all open slots and all nodes above the depth that they draft."""
        line, hidden, _ = self._line(root, count)
        nodes = Staggered(
            self.streams.lengths, self.committed.lengths, columns=hidden.shape[1], device=root.device
        )
        tree = self.growth.begin(root, context)
        for depth in range(1, count + 1):
            hidden = self._stage(depth, nodes, line, hidden)
            deepest = picked(hidden, nodes.columns(nodes.latest, depth))
            level = tree.expand(self.head.logits(self.trunk, depth, deepest))
            if depth < count:
                nodes.add(level)
        return tree.draft(room)

    def _stage(self, depth: int, nodes: Staggered, line: Tensor, hidden: Tensor) -> Tensor:
        """What module `depth` makes of the states `hidden` that the one before it left in its columns."""
        width = len(nodes.line)
        fed = self.trunk.embed(torch.cat([line[:, depth : depth + width], nodes.tokens], dim=1))
        window = nodes.open(depth, self.streams)
        rotary = self.trunk.rotary(fed, window.positions)
        below = picked(hidden, nodes.sources(depth))
        return self.head.stage(depth)(below, fed, rotary, window.mask, self.streams.layer(depth - 1))

    def select(self, rows: Tensor) -> None:
        self.streams.select(rows)
        self.committed.select(rows)
        self.final = [[slots[row] for row in rows.tolist()] for slots in self.final]


def picked(hidden: Tensor, columns: Tensor) -> Tensor:
    """States [B, W, H] at columns [B, K] -> [B, K, H]."""
    return hidden.gather(1, columns[..., None].expand(-1, -1, hidden.shape[2]))


def build(
    network: Network,
    widths: Sequence[int] | None = None,
    tree_nodes: int | None = None,
    top_k: int = 4,
) -> SequentialDrafter:
    """widths: children of every node at depth 0, 1, ..., a tree fixed before it is drawn; tree_nodes and
    top_k: EAGLE-2's tree. Without either a chain."""
    growth = read_growth(
        "sequential", network.trunk.vocab_size, widths=widths, tree_nodes=tree_nodes, top_k=top_k
    )
    return SequentialDrafter(network, need_head(network, "sequential"), growth)
