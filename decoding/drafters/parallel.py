"""Drafting with Meta's parallel heads: every depth from one and the same state of the trunk.

Shapes: B rows, W new positions, H hidden size.
"""

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.committed import Committed
from decoding.draft import Context, Draft, chain, no_draft
from decoding.heads import need_head
from mtp import Network
from mtp.parallel import Parallel


class ParallelDrafter:
    """Head k at the last committed position i predicts token i+1+k; the root is token i+1.

    A head's keys are of committed states only, so nothing it caches can turn out wrong: `propose` first
    catches up with what was committed since it last ran, and the last position of that pass is the draft. A
    head that is not asked for lags behind and catches up when it is.
    """

    def __init__(self, network: Network, head: Parallel):
        self.trunk, self.head = network.trunk, head
        self.taps = head.taps

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
        _, states, counts = self.committed.since(self.cache.lengths)
        window = self.cache.open(states.shape[1])
        rotary = self.trunk.rotary(states, window.positions)
        last = torch.tensor([max(n - 1, 0) for n in counts], device=root.device)
        rows = torch.arange(len(root), device=root.device)
        tokens: list[Tensor] = []
        laws: list[Tensor | None] = []
        for depth in range(1, count + 1):
            hidden = self.head.blocks[depth - 1](states, rotary, window.mask, self.cache)
            logits = self.trunk.unembed(hidden[rows, last])
            law = context.law(logits, torch.stack(tokens, 1) if tokens else root[:, None][:, :0])
            token, q = context.draw(law, depth, depth)
            tokens.append(token)
            laws.append(q)
            self.final[depth - 1] = list(self.committed.lengths)
        return chain(tokens, laws, drafting_room(context.room, self.committed.lengths))

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.committed.select(rows)
        self.final = [[slots[row] for row in rows.tolist()] for slots in self.final]


def drafting_room(room: list[int], lengths: list[int]) -> list[int]:
    """A row with nothing committed has no state to draft from."""
    return [left if length else 0 for left, length in zip(room, lengths, strict=True)]


def build(network: Network) -> ParallelDrafter:
    return ParallelDrafter(network, need_head(network, "parallel"))
