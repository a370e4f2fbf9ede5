"""Drafting with Meta's parallel heads: every depth from one and the same state of the trunk.

Shapes: B rows, W new positions, H hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.branching import draw_tree, straight
from decoding.cache import KVCache
from decoding.committed import Committed
from decoding.draft import Context, Draft, no_draft
from decoding.heads import need_head
from decoding.shape import Shape, read_shape
from mtp import Network
from mtp.drafting import Columns, columns_at, depths_of, picked, prepare
from mtp.parallel import Parallel


class ParallelDrafter:
    """Head k at the last committed position i predicts token i+1+k; the root is token i+1.

    A head's keys are of committed states only, so nothing it caches can turn out wrong: `propose` first
    catches up with what was committed since it last ran, and the last position of that pass is the draft. A
    head that is not asked for lags behind and catches up when it is. What a head says does not depend on what
    the others drafted, so a tree costs no more passes than a chain.
    """

    def __init__(self, network: Network, head: Parallel, shape: Shape):
        self.trunk, self.head, self.shape = network.trunk, head, shape
        self.taps = head.taps
        prepare(self.trunk, head)

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.cache = KVCache(batch_size, self.trunk.device)
        self.committed = Committed(batch_size)
        self.final = [[0] * batch_size for _ in self.head.blocks]  # by head and row: positions it has run on

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        self.committed.extend(tokens, states[self.taps[0]], keep)

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        count = min(num_draft_tokens, self.head.depth, max(context.room))
        if count <= 0 or not any(self.committed.lengths):
            return no_draft(root)
        self.cache.lengths = [min(slots) for slots in zip(*self.final[:count], strict=True)]
        tokens, states, counts = self.committed.since(self.cache.lengths)
        kernel = depths_of(self.trunk, self.head, states)
        window = self.cache.open(states.shape[1], causal=kernel is not None)
        rotary = kernel.angles.of(window) if kernel else self.trunk.rotary(states, window.positions)
        last = columns_at(tuple(max(count - 1, 0) for count in counts), root.device)
        columns = Columns(states, tokens, 1, last, rotary, window.mask, self.cache)
        self.final[:count] = [list(self.committed.lengths) for _ in range(count)]
        room = drafting_room(context.room, self.committed.lengths)
        if kernel is not None and context.takes_best and self.shape.is_chain:
            parents = straight(count, room, root.device)
            return Draft(kernel.greedy(columns, count), parents)
        logits = self._logits(columns, count) if kernel is None else kernel.logits(columns, 1, count)[1]
        return draw_tree(logits[:, :, 0].unbind(0), self.shape, context, room)

    def _logits(self, columns: Columns, count: int) -> Tensor:
        """What depths 1 ... count say of the columns read out: [D, B, C, V]."""
        hidden, outputs = columns.states, []
        for depth in range(1, count + 1):
            source = self.head.source(columns.states, hidden)
            hidden = self.head.run(depth, source, columns.rotary, columns.mask, self.cache)
            outputs.append(picked(hidden, columns.read))
        # All depths have one output matrix: it is read once for all of them.
        return self.head.logits(self.trunk, count, torch.stack(outputs))

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.committed.select(rows)
        self.final = [[slots[row] for row in rows.tolist()] for slots in self.final]


def drafting_room(room: list[int], lengths: list[int]) -> list[int]:
    """A row with nothing committed has no state to draft from."""
    return [left if length else 0 for left, length in zip(room, lengths, strict=True)]


def build(
    network: Network, widths: Sequence[int] | None = None, paths: Sequence[Sequence[int]] | None = None
) -> ParallelDrafter:
    """widths: children of every node at depth 0, 1, ...; paths: a sparse tree. Without either a chain."""
    shape = read_shape("parallel", network.trunk.vocab_size, widths, paths)
    return ParallelDrafter(network, need_head(network, "parallel"), shape)
